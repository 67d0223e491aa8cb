"""`sojourn server keys`: API keys of a server."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from sojourn.commands.cli import out, table
from sojourn.commands.help_page import HelpPage
from sojourn.metrics.errors import InputError

keys = HelpPage(help="Create and list the API keys of a server.", no_args_is_help=True)
FileOption = Annotated[Path, typer.Option(help="file of hashed keys, as `sojourn serve --api-keys` reads it")]


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="whose calls the key makes")],
    file: FileOption = Path("keys.yaml"),
    admin: Annotated[bool, typer.Option("--admin", help="open every route, and act for any tenant")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="open /metrics alone")] = False,
) -> None:
    """Print a new key once, and append its hash to the file. A server that uses the file reads it within a second."""
    from sojourn.engine.server.gateway.access.keys import append_key, create_key
    from sojourn.engine.server.gateway.access.rules import load_rules

    if admin and metrics:
        raise InputError("a key has one scope; leave --admin or --metrics out")
    if file.exists():
        load_rules(None, file)  # a file that no server can read gets no further key
    try:
        key, entry = create_key(tenant, "admin" if admin else "metrics" if metrics else "api")
        append_key(file, entry)
    except ValidationError:
        raise InputError(
            f"--tenant={tenant!r} is not valid: use 1 to 128 letters, digits and the signs _ . : @ -"
        ) from None
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}; choose another with --file") from None
    print(key)


@keys.command("list")
def list_keys(file: FileOption = Path("keys.yaml")) -> None:
    """List ids, tenants and scopes. To revoke a key, delete its line in the file."""
    from sojourn.engine.server.gateway.access.rules import load_rules

    shown = table("id", "tenant", "scope", "created", text=("id", "tenant", "scope", "created"))
    for entry in load_rules(None, file).keys.values():
        shown.add_row(entry.id, entry.tenant, entry.scope, entry.created)
    out.print(shown)
