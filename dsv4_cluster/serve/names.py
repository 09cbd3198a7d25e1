"""Names of the deployments, as they appear in config files, logs and `serve status`."""

ROUTER = "Router"
PREFILL = "Prefill"
DECODE = "Decode"
RESPONSE_STORE = (
    "ResponseStore"  # with several routers; there is always one of it, so that nothing about it is settable
)
DEPLOYMENTS = (ROUTER, PREFILL, DECODE)
