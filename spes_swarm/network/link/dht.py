"""hivemind's DHT, with limits on what it decodes before any validator runs.

Any connected peer can send a dictionary to be stored, or answer a search with one: up to 4 MiB of msgpack, which
hivemind decodes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgpack
from hivemind.dht import DHTNode
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.utils.serializer import MSGPackSerializer

from spes_swarm.base.decoding import check_msgpack

# The only extension that the swarm's records use. hivemind's other one, for tuples, would be decoded without a limit.
_DICTIONARY: Final[int] = MSGPackSerializer._ext_types[DictionaryDHTValue]


def _loads(buf: bytes) -> Any:
    check_msgpack(buf, ext_codes=(_DICTIONARY,))
    return msgpack.loads(buf, ext_hook=MSGPackSerializer._decode_ext_types, raw=False)


def bound_dht_decoding() -> None:
    """Makes hivemind in this process refuse messages with more values, or deeper nesting, than honest nodes send.

    A dictionary is decoded by a separate call, so the limits hold for its content as well. A refused message ends the
    call that brought it, as malformed bytes do.
    """
    MSGPackSerializer.loads = staticmethod(_loads)


async def join_dht(
    p2p: P2P, initial_peers: Sequence[str], validator: RecordValidatorBase, *, client_mode: bool, **options: Any
) -> DHTNode:
    """Creates this process's DHT node; `options` are passed on to `DHTNode.create`.

    Succeeds even if no initial peer answers: `daemon.bootstrap` has run before, and reports failures better.
    """
    bound_dht_decoding()
    return await DHTNode.create(
        p2p=p2p,
        initial_peers=list(initial_peers) or None,
        client_mode=client_mode,
        record_validator=validator,
        reuse_get_requests=False,  # see run_records.search
        strict=False,
        ensure_bootstrap_success=False,
        **options,
    )
