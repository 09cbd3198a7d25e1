"""`/v1/models`, `/health` (this process answers) and `/ready` (a request would be accepted)."""

from starlette.responses import JSONResponse, Response

from dsv4_cluster.frontend.edge import Gate
from dsv4_cluster.frontend.generation import Backend

OWNER = "dsv4-cluster"


def list_models(backend: Backend, created_s: int) -> Response:
    """Every served name. created_s: Unix time at which the app was built."""
    return JSONResponse({"object": "list", "data": [_model(backend, n, created_s) for n in backend.codec.models.names]})


def get_model(backend: Backend, name: str, created_s: int) -> Response:
    """One served name. Raises: ModelNotFoundError."""
    backend.codec.models.resolve(name)
    return JSONResponse(_model(backend, name, created_s))


def health() -> Response:
    """Liveness: says nothing about the workers."""
    return JSONResponse({"status": "ok"})


async def ready(backend: Backend, gate: Gate) -> Response:
    """Readiness: 200, or 503 with the reasons."""
    reasons = ["this router drains"] if gate.is_draining else await backend.service.unready_reasons()
    if not reasons:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready", "reasons": list(reasons)}, status_code=503)


def _model(backend: Backend, name: str, created_s: int) -> dict[str, str | int]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": OWNER,
        "max_model_len": backend.max_model_len,
    }
