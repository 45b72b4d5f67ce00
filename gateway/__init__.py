"""The gateway: HTTP, tokens and text, routing, admission, and the fate of every request."""
