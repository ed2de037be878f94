"""The LMCache server as a peer: requests, layouts, data planes and the context over them."""
