"""Whether a server can be reached, and at which hop a connection to it fails.

A request goes the way of a SuperNode's: through the proxy of the environment, with TLS under the
federation's authority, signed with the client's key. The server's door answers with its version.
"""

import json
import socket
import ssl
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedvl.deployment.door import HELLO
from fedvl.deployment.keys import load_key
from fedvl.deployment.link import flower
from fedvl.deployment.messages import FORMAT
from fedvl.errors import FedVLError
from fedvl.version import __version__

Hop = Literal["proxy", "name", "port", "TLS", "authority", "key", "clock", "version"]
HOPS: tuple[Hop, ...] = ("proxy", "name", "port", "TLS", "authority", "key", "clock", "version")  # in this order
STEP_SECONDS = 4.0  # for each of connecting, TLS and an answer
EXPIRED, OTHER_HOST, OTHER_ADDRESS = 10, 62, 64  # reasons of OpenSSL
PASSWORD, FORBIDDEN, UNKNOWN, NO_SUCH_PAGE = 407, 403, 401, 404
NO_SERVER_BEHIND = (502, 503, 504)


class UnreachableError(FedVLError):
    """A connection that fails; ``lasting``: waiting does not mend it.

    ``proxy``: the proxy that it went through.
    """

    def __init__(self, hop: Hop, sentence: str, lasting: bool = False, proxy: str = "") -> None:
        super().__init__(sentence)
        self.hop, self.lasting, self.proxy = hop, lasting, proxy


class Reached(NamedTuple):
    """A server that answers: its version of FedVL ("" without a key), and the proxy on the way."""

    version: str
    proxy: str


def reach(address: str, authorities: str = "", key: Path | None = None) -> Reached:
    """Ask the server at this address for its version; raise an UnreachableError that names the hop.

    Without authorities (PEM) any certificate is accepted. Without a client's key nothing is said of
    key, clock and version.
    """
    way = Way(address)
    headers = flower().signed_headers(load_key(key)) if key else {}
    try:
        with httpx.Client(verify=tls_context(authorities), timeout=STEP_SECONDS) as client:
            answer = client.post(
                f"https://{address}{HELLO}", headers=headers, content=b"", extensions={"trace": way.note}
            )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError) as error:
        raise way.explain(error) from error
    if answer.status_code in NO_SERVER_BEHIND:
        raise way.failed("port", f"What answers at {address} does not reach the server ({answer.status_code}).")
    return Reached(way.version_in(answer) if key else "", way.proxy)


def tls_context(authorities: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authorities:
        context.load_verify_locations(cadata=authorities)
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def read_authorities(path: Path) -> str:
    """Return the certificates of a bundle as plain PEM; OpenSSL refuses its comments."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedVLError(
            f"{path} holds no certificates in PEM form; give the file of your network's operator."
        ) from error
    return "".join(each.public_bytes(Encoding.PEM).decode("ascii") for each in found)


class Way:
    """How far a request has come, and what stopped it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.proxy = ""
        self.step = ""

    def note(self, event: str, info: dict[str, Any]) -> None:
        """Follow the request; httpx calls it before and after each step."""
        self.step = event.partition(".")[2]
        if self.step == "connect_tcp.started" and (peer := f"{info['host']}:{info['port']}") != self.target:
            self.proxy = peer

    @property
    def target(self) -> str:
        return self.address.replace("[", "").replace("]", "")

    def failed(self, hop: Hop, sentence: str, lasting: bool = False) -> UnreachableError:
        return UnreachableError(hop, sentence, lasting, self.proxy)

    def explain(self, error: Exception) -> UnreachableError:
        """Return which hop an exception of httpx is about, and what to do."""
        cause: BaseException = error
        while inner := cause.__cause__ or cause.__context__:
            cause = inner
        if isinstance(error, httpx.ProxyError):
            return self._refused_by_proxy(str(error))
        if not self.step:
            return self.failed(
                "proxy", f"HTTPS_PROXY cannot be used ({error}); give http://USER:PASSWORD@HOST:PORT.", True
            )
        if self.step.startswith("connect_tcp"):
            return self._not_connected(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return self.failed("authority", self._distrusted(cause), True)
        if self.step.startswith("start_tls"):
            return self.failed(
                "TLS",
                f"{self.address} accepts connections and does not speak TLS as a server of FedVL ({cause or type(cause).__name__}); "
                "check the port, and whether a firewall or proxy on the way cuts TLS.",
            )
        return self.failed("port", f"{self.address} ended the connection without an answer ({type(error).__name__}).")

    def _refused_by_proxy(self, status: str) -> UnreachableError:
        code = status[:3]
        if code == str(PASSWORD):
            what = f"The proxy {self.proxy} asks for a user and password"
            return self.failed("proxy", f"{what} ({status}); set HTTPS_PROXY=http://USER:PASSWORD@{self.proxy}.", True)
        if code == str(FORBIDDEN):
            what = f"The proxy {self.proxy} does not allow {self.address}"
            return self.failed("proxy", f"{what} ({status}); ask its operator to allow CONNECT to it.", True)
        return self.failed(
            "port", f"The proxy {self.proxy} does not reach {self.address} ({status}); is the server started?"
        )

    def _not_connected(self, cause: BaseException) -> UnreachableError:
        host = (self.proxy or self.target).rpartition(":")[0]
        whose = "the proxy" if self.proxy else "the server"
        if isinstance(cause, socket.gaierror):
            hop: Hop = "proxy" if self.proxy else "name"
            return self.failed(hop, f"The name {host} of {whose} is not known here; check it, and this machine's DNS.")
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else "no answer"
        hop, advice = (
            ("proxy", "HTTPS_PROXY") if self.proxy else ("port", "that the server is started and firewalls allow it")
        )
        return self.failed(hop, f"No connection to {self.proxy or self.address} ({reason}); check {advice}.")

    def _distrusted(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code == EXPIRED:
            return f"The certificate of {self.address} has expired; its operator runs fedvl federation renew, and restarts."
        if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
            return f"The certificate is not for {self.address}; use the name or address that the operator gave to init --host."
        return (
            f"The certificate of {self.address} is not of this federation's authority ({error.verify_message}): another "
            "server, or a firewall that inspects TLS; check the address and ca.crt, or ask for an exception."
        )

    def version_in(self, answer: httpx.Response) -> str:
        """Return the server's version; refuse one whose messages have another format."""
        try:
            content = json.loads(answer.content)
            told = str(content.get("detail", ""))
        except (ValueError, AttributeError):
            content, told = {}, ""
        if answer.status_code == UNKNOWN:
            if "clock" in told:
                raise self.failed("clock", f"{told} Set this machine's clock.", True)
            raise self.failed(
                "key",
                "The server does not know this client's key: it was not admitted yet, or was revoked. Ask the operator to admit "
                "the request of fedvl federation join.",
                True,
            )
        if not isinstance(theirs := content.get("fedvl"), str) or not isinstance(content.get("messages"), int):
            raise self.failed(
                "version",
                f"The server does not say its version of FedVL ({answer.status_code}): it is older than {__version__} here, or "
                "no server of FedVL. Install the same version on both machines.",
                True,
            )
        if content["messages"] != FORMAT:
            raise self.failed(
                "version",
                f"The server runs FedVL {theirs[:20]} and this machine {__version__}, whose messages have different formats "
                f"({content['messages']} and {FORMAT}). Install the same version on both machines.",
                True,
            )
        return theirs
