"""HTTP to a gateway for the commands that a person runs, with errors as sentences."""

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvrelay.errors import KVRelayError


class GatewayError(KVRelayError):
    """The gateway cannot be reached, or said no. The text is for the person at the terminal."""


def connect(url: str, timeout_s: float | None = 5.0) -> httpx.Client:
    """A client for the gateway at `url`. Proxies set in the environment are not asked for this machine itself."""
    timeout = httpx.Timeout(timeout_s, connect=5.0)
    return httpx.Client(base_url=url.rstrip("/"), timeout=timeout, trust_env=not is_local(url))


def get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    """GETs a JSON object. Raises GatewayError if that fails."""
    try:
        response = client.get(path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(client, error) from error
    if response.status_code != httpx.codes.OK:
        raise GatewayError(refusal(response.status_code, response.content))
    return json_object(response, f"{client.base_url}{path.lstrip('/')}")


def json_object(response: httpx.Response, where: str) -> dict[str, Any]:
    """The body as a JSON object. Raises GatewayError if it is something else: no gateway answered."""
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise GatewayError(f"What answers at {where} is no KVRelay gateway; check --url.")
    return content


def unreachable(client: httpx.Client, error: Exception) -> GatewayError:
    """No answer: says from where, why, and what to do."""
    url = str(client.base_url).rstrip("/")
    reason = str(error) or type(error).__name__
    return GatewayError(
        f"No gateway answers at {url} ({reason}); start one with `kvrelay up`, or name another address with --url."
    )


def refusal(status: int, body: bytes) -> str:
    """A sentence from an answer that is an error: the server's own, if it is in OpenAI's form."""
    try:
        message = httpx.Response(status, content=body).json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The gateway answered with HTTP status {status}."
    return f"{message} (HTTP status {status})"


def is_local(url: str) -> bool:
    """True for an address of this machine itself, for which no proxy is asked."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
