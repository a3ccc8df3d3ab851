"""What server and clients write to each other: a header that says what the letter belongs to, and tensors as bytes.

A reply repeats the header of the request it answers, so that one of another run, round or attempt is known for what it is.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from fedvl.errors import FedVLError

Name = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
Kind = Literal["train", "report", "adopt", "finish"]


class Header(BaseModel):
    """Whose letter it is. ``state`` names private tensors that lie with the client by their SHA-256; none if empty."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: Name
    experiment: Name  # SHA-256 of its description: a client works on those that lie in its own folder only
    round: Annotated[int, Field(ge=0, lt=2**31)]
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    kind: Kind
    client: Annotated[int, Field(ge=0, lt=2**31)]
    state: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = (
        ""  # request: those to begin with; reply: those that resulted
    )
    # replies only
    weight: FiniteFloat = 0.0
    loss: FiniteFloat = 0.0
    idle: bool = False  # the client has nothing to do in this round
    problem: Annotated[str, Field(max_length=500)] = ""  # why there is no answer

    def answers(self, request: "Header") -> bool:
        return all(
            getattr(self, field) == getattr(request, field)
            for field in ("run", "experiment", "round", "attempt", "kind", "client")
        )


class Letter(NamedTuple):
    header: str  # JSON
    payload: bytes = b""  # safetensors; empty where there are none

    def read_header(self) -> Header:
        """The header, or a FedVLError that says what is wrong with it."""
        try:
            return Header.model_validate_json(self.header)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "whole"
            raise FedVLError(f"the header of its message is not one ({where}: {problem['msg'][:200]})") from error


def write(header: Header, payload: bytes = b"") -> Letter:
    return Letter(header.model_dump_json(), payload)
