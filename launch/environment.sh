# Sourced by the launch scripts: Ray's own settings for one machine without a load balancer. Serve reads them when it is
# imported, so they must be in the environment of every Ray process. `dsv4 serve` sets the same ones.

# User code, request routing and token streams share the event loop of a replica; replicas talk gRPC. Without this a
# token stream is many times slower.
export RAY_SERVE_THROUGHPUT_OPTIMIZED=1
# That mode also opens one HTTP port per replica for a load balancer in front, and keeps a stopping replica open for
# 30 s so that the load balancer can take notice. Here is none.
export RAY_SERVE_ENABLE_DIRECT_INGRESS=0
# Serve's proxy appends a request id of its own to answers that have one; this keeps the router's, which is in the log.
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=dsv4_cluster.serve.proxy_headers:middlewares
# A proxy that is not up after this many seconds is killed; Serve's 5 are too few on a busy machine.
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60
# A Ray instance of its own, even when another one runs on this machine.
export RAY_ADDRESS=local
# No token file in the home directory; nothing listens beyond this machine.
export RAY_AUTH_MODE=disabled
export RAY_USAGE_STATS_ENABLED=0
