"""ClusterConfig -> Serve application: the builder that `configs/*.yaml` name as import_path."""

import ray
from ray import serve
from ray.serve import Application

from dsv4_cluster.config.cluster_config import ClusterConfig, WorkerRole
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.serve.decode_deployment import DecodeDeployment
from dsv4_cluster.serve.ingress import RouterIngress, RouterSpec
from dsv4_cluster.serve.names import DECODE, PREFILL, RESPONSE_STORE, ROUTER
from dsv4_cluster.serve.placement import check_placement, live_nodes, role_bundles
from dsv4_cluster.serve.prefill_deployment import PrefillDeployment
from dsv4_cluster.serve.request_router import pinned_router_config
from dsv4_cluster.serve.response_store import ResponseStoreDeployment
from dsv4_cluster.worker.spec import WorkerSpec

HEALTH_PERIOD_S = 1.0  # one small call per replica; a dead worker is replaced within this plus a process start
HEALTH_TIMEOUT_S = 10.0
SPARE_CALLS = 64  # calls besides requests: one subscription per router, polls, aborts
DRAIN_POLL_S = 0.5  # Serve's default of 2 s would be the least time any replica takes to go


def build(args: ClusterConfig) -> Application:
    """Build the graph: router -> (prefill, decode), and with several routers -> the store of their responses.

    Raises: ConfigError when the cluster is too small, with the sum of what is asked.
    """
    if ray.is_initialized():
        check_placement(args, live_nodes())
    prefill = _worker_deployment(PrefillDeployment, PREFILL, args.prefill, drain_s=args.router.request_timeout_s)
    decode = _worker_deployment(DecodeDeployment, DECODE, args.decode, drain_s=args.router.request_timeout_s)
    return router_deployment(args).bind(
        router_spec(args),
        prefill.bind(_worker_spec(args, "prefill", args.prefill)),
        decode.bind(_worker_spec(args, "decode", args.decode)),
        _response_store(args.router) if args.router.num_replicas > 1 else None,
    )


def router_deployment(args: ClusterConfig) -> serve.Deployment:
    """The router's deployment, not yet bound to a spec and handles."""
    return serve.deployment(name=ROUTER)(RouterIngress).options(
        num_replicas=args.router.num_replicas,
        ray_actor_options={"num_cpus": args.router.num_cpus},
        # Our own admission answers 429 above the limit; Serve's must not queue requests before it.
        max_ongoing_requests=2 * args.router.max_ongoing_requests + SPARE_CALLS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=args.router.request_timeout_s,
    )


def _response_store(config: RouterConfig) -> Application:
    # each router asks once per request, and waits all the time for each of its background responses
    num_calls = config.num_replicas * (config.max_ongoing_requests + config.responses.max_background)
    store = serve.deployment(name=RESPONSE_STORE)(ResponseStoreDeployment).options(
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=num_calls + SPARE_CALLS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
    )
    return store.bind(config.responses)


def router_spec(config: ClusterConfig) -> RouterSpec:
    """What the router is told of a config."""
    return RouterSpec(
        model=config.model,
        router=config.router,
        engines=tuple((role.engine, role.kv) for role in (config.prefill, config.decode)),
    )


def _worker_spec(config: ClusterConfig, role_name: str, role: WorkerRole) -> WorkerSpec:
    return WorkerSpec(
        role_name=role_name,
        checkpoint_dir=config.model.path,
        role=role,
        transfer=config.transfer,
        speculation=config.speculation,
    )


def _worker_deployment(cls: type, name: str, role: WorkerRole, *, drain_s: float) -> serve.Deployment:
    bundles = role_bundles(role)
    return serve.deployment(name=name)(cls).options(
        num_replicas=role.num_replicas,
        ray_actor_options={"num_cpus": bundles[0]["CPU"]},
        placement_group_bundles=bundles,
        max_ongoing_requests=role.max_ongoing_requests + SPARE_CALLS,
        request_router_config=pinned_router_config(),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=drain_s,
    )
