"""Translates gRPC's messages about failed handshakes into words that name the fault and who has to mend it. Pure.

The side that rejects a certificate knows more than the other: a server that rejects a client's certificate ends the
connection with an alert, or silently. So each side checks its own certificate first (own_certificate.py).
"""

from typing import Final, NamedTuple


class Sentence(NamedTuple):
    """A sentence about the peer: `its certificate has expired`, and what to do."""

    meaning: str
    advice: str


OTHER_NAME: Final = "its certificate does not carry the expected name"
_REFUSED: Final = "it does not take this side's certificate"
_SENTENCES: Final = {
    "certificate has expired": Sentence(
        "its certificate has expired, by this machine's clock", "make it a new one, or set this clock"
    ),
    "certificate is not yet valid": Sentence(
        "its certificate is not valid yet, by this machine's clock", "set the clocks of both machines"
    ),
    "unsupported certificate purpose": Sentence(
        "its certificate may not be used by servers", "make it one with `headway certs`, or with serverAuth"
    ),
    "CERTIFICATE_VERIFY_FAILED": Sentence(
        "its certificate is not signed by this side's ca.pem", "name that cluster's folder with --certs"
    ),
    "Hostname Verification Check failed": Sentence(
        OTHER_NAME, "etcd's has to bear the host that is dialled, a node's the node's name"
    ),
    "ALERT_UNKNOWN_CA": Sentence(f"{_REFUSED}: it is of another authority", "name the right folder with --certs"),
    "CERTIFICATE_EXPIRED": Sentence(f"{_REFUSED}, which has expired by its clock", "make a new one, or set its clock"),
    "CERTIFICATE_REQUIRED": Sentence("it wants a client certificate", "name its folder with --certs"),
    "ALERT_BAD_CERTIFICATE": Sentence(
        f"{_REFUSED}: it is of another authority, or its clock is wrong",
        "name the right folder with --certs, and compare the clocks",
    ),
    "WRONG_VERSION_NUMBER": Sentence("what listens there speaks no TLS", "name another port, or leave --certs out"),
    "missing selected ALPN property": Sentence(
        "what listens there is another service, such as a web server", "name another port"
    ),
    "HTTP proxy returned response code 404": Sentence(
        "no such process is behind that port", "see where it is now with `headway nodes`"
    ),
    "HTTP proxy returned response code": Sentence(
        "what listens there is another service, such as a web server", "name another port"
    ),
    # As the answer to CONNECT: SSH, for instance, speaks first.
    "Expected 'H'": Sentence("what listens there is another service", "name another port"),
    "Failed parsing HTTP/2": Sentence(
        "what listens there is another service, or wants TLS", "name another port, or --certs"
    ),
}
"""Marks in gRPC's messages, and their meanings; the first that fits counts."""


def sentence_of(text: str) -> Sentence | None:
    """Return the meaning of a text of gRPC's about a handshake; None: unknown."""
    return next((sentence for mark, sentence in _SENTENCES.items() if mark in text), None)


def in_words(text: str) -> str:
    """Return a text of gRPC's, or its meaning if it is about a handshake."""
    sentence = sentence_of(text)
    return " ".join(text.split()) if sentence is None else sentence.meaning
