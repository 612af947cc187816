"""One server with all environments of this folder, each below its name. It runs in OpenEnv's own environment."""

from __future__ import annotations

from atlas import Atlas
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from vault import Combination, Dials, Vault

app = FastAPI()
app.mount("/atlas", create_app(Atlas, CallToolAction, CallToolObservation, env_name="atlas", max_concurrent_envs=8))
app.mount("/vault", create_app(Vault, Combination, Dials, env_name="vault", max_concurrent_envs=1))


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "healthy"}
