"""``hyper-parallel schema``: the JSON Schema of policy files."""

import json

import click

from hyper_parallel.policy_file import json_schema


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As for every command; the schema is JSON with or without it.")
def schema(as_json: bool) -> None:
    """Print the JSON Schema of policy files, for editors that complete and check them.

    It is made from the models that validate the files. Save it as policy.schema.json, and begin a file with

      # yaml-language-server: $schema=policy.schema.json
    """
    click.echo(json.dumps(json_schema(), indent=2))
