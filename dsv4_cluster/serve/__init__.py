"""The Ray Serve graph: router, prefill and decode deployments and the clients between them."""
