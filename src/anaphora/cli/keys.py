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
from anaphora.profiles import PROFILES

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
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PROFILES),
            help="Whose caching rules count for its requests. Default: the server's profile.",
        ),
    ] = None,
    keys_file: KeysFile = DEFAULT_KEYS_FILE,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It is shown this once."""
    key = KeyFile(keys_file).add(name, tenant, operator=operator, profile=profile)
    if as_json:
        made = {"name": name, "tenant": tenant or name, "operator": operator, "profile": profile}
        print(json.dumps({**made, "key": key}))
        return
    print(key)  # alone on stdout, for $(anaphora keys add ...)
    err.print("This is shown once. Clients send it as their API key.")


@app.command()
def ls(keys_file: KeysFile = DEFAULT_KEYS_FILE, as_json: AsJson = False) -> None:
    """List all keys: their names and tenants, and what those share."""
    file = KeyFile(keys_file)
    records, shared = file.records(), file.shared()
    if as_json:
        members = ("name", "tenant", "operator", "profile", "created")
        listed = [
            {**{m: asdict(r)[m] for m in members}, "shared": shared.get(r.tenant)} for r in records
        ]
        print(json.dumps(listed, indent=2))
        return
    if not records:
        out.print("no keys: the server takes requests from this machine only")
        return
    table = Table("name", "tenant", "operator", "profile", "shares in", "made", box=box.SIMPLE)
    for record in records:
        made = datetime.fromtimestamp(record.created, UTC).astimezone()
        table.add_row(
            record.name,
            record.tenant,
            "yes" if record.operator else "",
            record.profile or "",
            shared.get(record.tenant, ""),
            f"{made:%Y-%m-%d %H:%M}",
        )
    out.print(table)


@app.command()
def share(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    namespace: Annotated[str, typer.Argument(help="What all who share have to name.")],
    keys_file: KeysFile = DEFAULT_KEYS_FILE,
    as_json: AsJson = False,
) -> None:
    """Let a tenant share system prompts and tools with others of a namespace."""
    KeyFile(keys_file).share(tenant, namespace)
    if as_json:
        print(json.dumps({"tenant": tenant, "shared": namespace}))
        return
    out.print(f"tenant {tenant} shares system prompts and tools in {namespace}", markup=False)


@app.command()
def unshare(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    keys_file: KeysFile = DEFAULT_KEYS_FILE,
    as_json: AsJson = False,
) -> None:
    """Let a tenant share nothing any more."""
    namespace = KeyFile(keys_file).unshare(tenant)
    if as_json:
        print(json.dumps({"tenant": tenant, "shared": None}))
        return
    out.print(f"tenant {tenant} shares nothing in {namespace} any more", markup=False)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name.")],
    keys_file: KeysFile = DEFAULT_KEYS_FILE,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from now on, in a running server too."""
    record = KeyFile(keys_file).revoke(name)
    if as_json:
        print(json.dumps({"name": record.name, "tenant": record.tenant}))
        return
    out.print(f"revoked {record.name} of tenant {record.tenant}", markup=False)
