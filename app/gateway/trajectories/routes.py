"""Routes of trajectories: `/v1/trajectories`, and what a harness calls below `/v1/trajectories/ID`.

OpenAI's clients append `/chat/completions` to a base URL, Anthropic's `/v1/messages`, so one base serves both. The
dialects beside chats are vLLM's own classes; vLLM is loaded at the first request of one.
"""

import asyncio
from collections.abc import Callable, Mapping
from importlib import import_module

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tailrace.app.gateway import answers
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.requests import CompletionRequest
from tailrace.app.gateway.service import GatewayService
from tailrace.app.gateway.trajectories.harness import Harness
from tailrace.app.gateway.trajectories.requests import OpenRequest, RewardRequest
from tailrace.app.gateway.trajectories.row_images import row_images
from tailrace.app.gateway.trajectories.rows import trajectory_body
from tailrace.app.gateway.trajectories.trajectories import GatewayTrajectories
from tailrace.app.gateway.trajectories.tree import TrajectoryTree
from tailrace.deployments.messages.roles import Role

BASES = ("/v1/trajectories/{name}", "/v1/trajectories/{name}/v1")
"""Paths below which a harness finds its routes."""

DIALECTS = {
    "/messages": ("messages_api", "messages"),
    "/messages/count_tokens": ("messages_api", "count_tokens"),
    "/responses": ("responses_api", "responses"),
}
"""Routes in vLLM's other dialects: module and function."""


def add_trajectories(app: FastAPI, service: GatewayService, trajectories: GatewayTrajectories) -> None:
    @app.post("/v1/trajectories")
    async def open_trajectory(request: OpenRequest, http: Request):
        """Open a trajectory: a base URL and a key for a harness."""
        await service.model(request.model)
        name, key = await trajectories.open(http.scope["role"], request)
        return {"id": name, "base_url": f"{http.base_url}v1/trajectories/{name}", "api_key": key}

    @app.get("/v1/trajectories/{name}")
    async def trajectory(name: str, http: Request):
        """Return the training rows so far."""
        tree = await trajectories.tree(http.scope["role"], name)
        items = await row_images(service, tree)
        return await _rows(tree, None, items)

    @app.post("/v1/trajectories/{name}/reward")
    async def reward(name: str, request: RewardRequest, http: Request):
        """End a trajectory with its reward. Return its rows, which are kept nowhere else."""
        return await _ended(http.scope["role"], name, request.reward)

    @app.delete("/v1/trajectories/{name}")
    async def delete(name: str, http: Request):
        """End a trajectory without a reward. Return its rows."""
        return await _ended(http.scope["role"], name, None)

    async def _ended(role: Role, name: str, reward: float | None) -> JSONResponse:
        items = await row_images(service, await trajectories.tree(role, name))  # an error of theirs ends nothing
        tree = await trajectories.end(role, name, reward)
        items = await row_images(service, tree, items)
        return await _rows(tree, reward, items)

    _add_harness(app, service, Harness(service, trajectories))


async def _rows(tree: TrajectoryTree, reward: float | None, items: Mapping[str, str]) -> JSONResponse:
    body = trajectory_body(tree, reward, items)
    return await asyncio.to_thread(JSONResponse, body)  # features are large


def _add_harness(app: FastAPI, service: GatewayService, harness: Harness) -> None:
    async def models(name: str):
        """Return the served models."""
        return answers.models(await service.model(), await service.client(Role.OBSERVER).adapters())

    async def chat_completions(name: str, request: ChatRequest, http: Request):
        """Make the next turn, in the form of `/v1/chat/completions`."""
        return await harness.answer(http, await harness.turn(http), request)

    async def completions(name: str, request: CompletionRequest, http: Request):
        """Make the next turn, in the form of `/v1/completions`."""
        return await harness.complete(http, await harness.turn(http), request)

    for base in BASES:
        app.add_api_route(f"{base}/models", models, methods=["GET"])
        app.add_api_route(f"{base}/chat/completions", chat_completions, methods=["POST"])
        app.add_api_route(f"{base}/completions", completions, methods=["POST"])
        for path, place in DIALECTS.items():
            app.add_api_route(base + path, _dialect(harness, *place), methods=["POST"], name=place[1])


def _dialect(harness: Harness, module: str, function: str) -> Callable:
    async def route(name: str, body: dict, http: Request):
        """Make the next turn, or count its tokens, in a dialect of vLLM's."""
        found = await asyncio.to_thread(import_module, f"tailrace.app.gateway.trajectories.{module}")
        return await getattr(found, function)(harness, body, http)

    return route
