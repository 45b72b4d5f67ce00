"""The hand-over of KV blocks: a pure protocol (`protocol`) and the transports that move the payload."""
