"""Names of the deployments, as they appear in config files, logs and `serve status`."""

ROUTER = "Router"
PREFILL = "Prefill"
DECODE = "Decode"
DEPLOYMENTS = (ROUTER, PREFILL, DECODE)
