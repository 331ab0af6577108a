"""The messages of clients in other processes: A2A's JSON, of 1.0 or 0.3."""

from typing import Final

from a2a.compat.v0_3 import conversions
from a2a.compat.v0_3 import types as old
from a2a.types import SendMessageRequest, StreamResponse
from google.protobuf.json_format import MessageToDict, ParseDict

from tests.matrix.remote import Json, Wire


def _new_request(request: SendMessageRequest) -> Json:
    data: Json = MessageToDict(request)
    return data


def _new_event(event: Json) -> StreamResponse:
    return ParseDict(event, StreamResponse())


def _old_request(request: SendMessageRequest) -> Json:
    params = conversions.to_compat_send_message_request(request, "").params
    data: Json = params.model_dump(mode="json", by_alias=True, exclude_none=True)
    return data


def _old_event(event: Json) -> StreamResponse:
    whole = old.SendStreamingMessageSuccessResponse.model_validate({"id": "", "result": event})
    return conversions.to_core_stream_response(whole)


NEW: Final = Wire(_new_request, _new_event)
"""`SendMessageRequest` and `StreamResponse` in the JSON of 1.0."""

OLD: Final = Wire(_old_request, _old_event)
"""`MessageSendParams`, and task, message or update in the JSON of 0.3."""
