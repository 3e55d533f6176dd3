"""``anaphora keys``: who may use the server."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from anaphora.cli.output import AsJson, err, out
from anaphora.config import variable
from anaphora.keys import DEFAULT_KEYS_FILE, KeyFile

app = typer.Typer(no_args_is_help=True, help="Say who may use the server.")

KeysFile = Annotated[
    Path,
    typer.Option(
        "--keys-file", metavar="FILE", envvar=variable("keys_file"), help="File of the keys."
    ),
]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call the key.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="Keys of one tenant share its cache. Default: one for this key alone."),
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may see the metrics of all tenants.")
    ] = False,
    keys_file: KeysFile = DEFAULT_KEYS_FILE,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It is shown this once."""
    key = KeyFile(keys_file).add(name, tenant, operator=operator)
    if as_json:
        made = {"name": name, "tenant": tenant or name, "operator": operator, "key": key}
        print(json.dumps(made))
        return
    print(key)  # alone on stdout, for $(anaphora keys add ...)
    err.print("This is shown once. Clients send it as their API key.")


@app.command()
def ls(keys_file: KeysFile = DEFAULT_KEYS_FILE, as_json: AsJson = False) -> None:
    """List names and tenants of all keys."""
    records = KeyFile(keys_file).records()
    if as_json:
        members = ("name", "tenant", "operator", "created")
        print(json.dumps([{m: asdict(r)[m] for m in members} for r in records], indent=2))
        return
    if not records:
        out.print("no keys: the server takes requests from this machine only")
        return
    table = Table("name", "tenant", "operator", "made", box=box.SIMPLE)
    for record in records:
        made = datetime.fromtimestamp(record.created, UTC).astimezone()
        operator = "yes" if record.operator else ""
        table.add_row(record.name, record.tenant, operator, f"{made:%Y-%m-%d %H:%M}")
    out.print(table)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name.")],
    keys_file: KeysFile = DEFAULT_KEYS_FILE,
) -> None:
    """Refuse a key from now on, in a running server too."""
    record = KeyFile(keys_file).revoke(name)
    out.print(f"revoked {record.name} of tenant {record.tenant}", markup=False)
