"""Compiles C++ sources into one shared library with torch's extension builder.

Run as a program by `native_build`: the builder needs ninja on its PATH, keeps state in torch, and loads what it made;
all of that ends with the process. Usage: native_compile.py FOLDER NAME SOURCE... -- COMPILER_FLAG...
"""

import sys

from torch.utils import cpp_extension

# Of what the builder adds for torch's sake nothing is linked, since nothing of it is used.
_LINKER_FLAGS = ["-fopenmp", "-Wl,--as-needed"]


def main(folder: str, name: str, *sources_and_flags: str) -> None:
    """Leaves `FOLDER/NAME.so`. Raises RuntimeError with what the compiler printed if it failed."""
    split = sources_and_flags.index("--")
    cpp_extension.load(
        name,
        list(sources_and_flags[:split]),
        extra_cflags=list(sources_and_flags[split + 1 :]),
        extra_ldflags=list(_LINKER_FLAGS),
        build_directory=folder,
        is_python_module=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
