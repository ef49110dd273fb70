"""The served model, as the SDKs of OpenAI and Anthropic read it."""

from datetime import UTC, datetime

from support.canned_gateway import CREATED_S, CannedGateway


def test_openais_sdk_reads_the_model() -> None:
    from openai import OpenAI

    with CannedGateway() as server, OpenAI(base_url=f"{server.url}/v1", api_key="key") as sdk:
        (listed,) = sdk.models.list()
        model = sdk.models.retrieve("policy")
    assert listed == model
    assert (model.id, model.object, model.created, model.owned_by) == ("policy", "model", CREATED_S, "rollq")


def test_anthropics_sdk_reads_the_model() -> None:
    from anthropic import Anthropic

    with CannedGateway() as server, Anthropic(base_url=server.url, api_key="key") as sdk:
        (listed,) = sdk.models.list()
        model = sdk.models.retrieve("policy")
    assert listed == model
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("policy", "model", "policy", 4096)
    assert model.created_at == datetime.fromtimestamp(CREATED_S, UTC)
