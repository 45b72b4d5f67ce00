"""The pool that receives KV blocks and generates every further token from them."""
