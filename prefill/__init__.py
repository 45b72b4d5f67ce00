"""The pool that turns prompts into KV blocks and first tokens."""
