// What Python calls: C names, and all others hidden.
#pragma once

#define KVRELAY_ENTRY extern "C" __attribute__((visibility("default")))
