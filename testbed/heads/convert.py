"""Head maps from one file format to another: `python -m testbed.heads convert IN OUT [to=redknot] [...]`.

    python -m testbed.heads convert Mistral-7B-Instruct-v0.2.tsv map.json to=headkv query_heads=32
    python -m testbed.heads convert map.json:retrieval_score heads.json to=redknot global_share=0.15 window_tokens=512

Keys: to (redknot, duoattention, headkv; a name that ends in .tsv means duoattention), kv_heads (of a HeadKV file),
query_heads (of the model, for headkv), global_share (part of the heads that redknot calls global), window_tokens and
sink_tokens (what redknot's local heads keep). A key that says otherwise than the map does is refused.
"""

from __future__ import annotations

from pathlib import Path

from testbed.heads import formats
from testbed.heads.imported import FormatError, ImportedMap
from testbed.heads.words import Words, whole

KINDS = {
    "to": str,
    "kv_heads": whole(1),
    "query_heads": whole(1),
    "global_share": float,
    "window_tokens": whole(1),
    "sink_tokens": whole(0),
}
USED = {
    "duoattention": set[str](),
    "headkv": {"query_heads"},
    "redknot": {"global_share", "window_tokens", "sink_tokens"},
}


def convert(source: str, target: str | Path, words: Words) -> ImportedMap:
    """Reads a map, writes it in another format, and gives what was written.

    Raises:
        FormatError: a file that is no map, an unknown format, a key that this format has no use for, or something
            missing that it needs.
    """
    to = words.get("to") or ("duoattention" if Path(target).suffix == ".tsv" else None)
    if to not in USED:
        raise FormatError(f"to={to}: must be one of {', '.join(USED)}")
    idle = sorted(set(words.values) - USED[to] - {"to", "kv_heads"})
    if idle:
        raise FormatError(f"{idle[0]} means nothing to {to}; it takes: {', '.join(sorted(USED[to])) or 'nothing'}")
    imported = formats.load(source, words.get("kv_heads"))
    options = {key: value for key, value in words.values.items() if key in USED[to]}
    makers = {"duoattention": formats.to_duoattention, "headkv": formats.to_headkv, "redknot": formats.to_redknot}
    made = makers[to](imported, **options)
    formats.write(made, target)
    return made


def main(args: list[str]) -> None:
    """The command."""
    words = Words.of(args, KINDS, FormatError)
    if len(words.plain) != 2:
        raise FormatError(f"convert takes two files, IN and OUT, and was given {len(words.plain)}")
    made = convert(words.plain[0], words.plain[1], words)
    columns = "query heads" if made.per_query else "KV heads"
    print(f"{words.plain[1]}: {made.kind}, {made.shape[0]} layers x {made.shape[1]} {columns}")
