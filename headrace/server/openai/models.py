# SPDX-License-Identifier: Apache-2.0
"""GET /v1/models and /v1/models/{model}."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.server.context import ServerContext, context_of
from headrace.server.openai.protocol.models import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    context = context_of(request)
    models = ModelList(data=[card(context, name) for name in context.model_names])
    return Response(models.model_dump_json(), media_type="application/json")


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    context = context_of(request)
    found = card(context, context.check_model(model))
    return Response(found.model_dump_json(), media_type="application/json")


def card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(id=name, created=context.created, max_model_len=context.llm.info.max_seq_len)
