"""`rollq groups query`: finds groups by their fields, samples and texts."""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollq.buffer.errors import ArchiveError, ConfigError
from rollq.cli.options import connection_options, file_and

if TYPE_CHECKING:
    from rollq.buffer.query.conditions import Condition
    from rollq.buffer.query.ranking import Sort
    from rollq.buffer.query.records import GroupRecord

HELP = """Find groups. QUERY is a JSON object; FILE is rollq.toml, by default the one in this folder. Changes
nothing.

A field with a value must be equal to it. A field with operators must satisfy all of them. Several fields must all
match. An empty query, {}, matches every group.

\b
Fields:
  task        name of the task
  uid         number of the group in its task
  arrival     the same number: groups are numbered as they arrive
  status      pending running completed gathered cooling aborted expired
              filtered failed claimed archived leaving
  staleness   of its oldest token, at the step that is trained next
  reward      mean of its samples; null before they are judged
  min_reward  the lowest reward of a sample
  max_reward  the highest reward of a sample
  tokens      response tokens of the longest sample
  finish_reason  why a sample ended: stop length tool_calls abort error
  failure     the part that a sample failed at: prompt provider context grader
              sandbox tool environment program
  tries       attempts since it was last interrupted or expired
  error       why it failed or was filtered, or the error of an earlier try
  step        the train step that has claimed it; while it is pending or
              running, the one that it was admitted for; else null
  prompt      its prompt, all messages; only $contains
  text        what its samples say, with conversations; only $contains
  sample      conditions that one and the same sample must satisfy, on its
              reward, tokens, finish_reason, error and failure

A search in prompt or text reads samples, which takes longer: narrow it by
other fields, and by --limit.

\b
Operators of a field:
  $eq $ne             '{"task": {"$ne": "math"}}'
  $gt $gte $lt $lte   '{"reward": {"$gt": 0, "$lt": 1}}'
  $in $not_in         '{"status": {"$in": ["failed", "filtered"]}}'
  $between            '{"staleness": {"$between": [1, 2]}}', both included
  $contains           '{"error": {"$contains": "timeout"}}', for error,
                      prompt and text
Operators between queries:
  $or                 '{"$or": [{"tries": {"$gte": 2}}, {"status": "aborted"}]}'
  $and                '{"$and": [{"status": "completed"}, {"staleness": {"$gte": 1}}]}'

\b
Example:
  rollq groups query '{"step": 3, "sample": {"reward": 0}}' --sort -tokens
  rollq groups query '{"status": "completed", "staleness": {"$gte": 1}}'
  rollq groups query rollq.toml '{"status": "failed", "task": "math"}' --json
  rollq groups query '{"status": "archived", "text": {"$contains": "sorry"}}' --limit 5
  rollq groups query '{"reward": null}' --url redis://127.0.0.1:6379/0 --run sums --count
"""


@click.command(short_help="Find groups by status, staleness, reward and more.", help=HELP)
@file_and(query="QUERY")
@connection_options
@click.option("--sort", help="Order by a field, the highest first with a - before it: -tokens.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Most groups to show.")
@click.option("--count", "only_count", is_flag=True, help="Show only the number of groups; --limit does not apply.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
def query(
    query: str,
    file: Path | None,
    url: str | None,
    run_name: str | None,
    sort: str | None,
    limit: int,
    only_count: bool,
    as_json: bool,
) -> None:
    from tqdm import tqdm

    from rollq.buffer.query.language import parse_query
    from rollq.buffer.query.plan import steps_of
    from rollq.buffer.query.ranking import QUERY_SORTS, Sort, first_records, without_repeats
    from rollq.cli.groups.left import LeftGroups
    from rollq.cli.run_location import find_run

    conditions = parse_query_text(query)
    condition = parse_query(conditions)
    order = Sort.parse(sort, QUERY_SORTS) if sort else None
    searches_texts = condition.searches_texts
    location = find_run(file, url, run_name)
    with (
        location.buffer() if searches_texts else location.without_payloads() as buffer,
        tqdm(desc="searched", unit=" groups", leave=False, disable=not (searches_texts and sys.stderr.isatty())) as bar,
    ):
        left = LeftGroups(buffer, location.archive_url)
        found = buffer.matching(conditions, bar.update)
        if steps_of(condition).is_bounded:  # finds the groups of a step in the buffer or the archive
            found = without_repeats(chain(found, left.matching(conditions)))
        groups = first_records(found, condition, order, None if only_count else limit + 1)
        dropped = left.dropped(condition)
    _print(groups, condition, order, limit=limit, only_count=only_count, as_json=as_json)
    if dropped:
        click.echo(dropped, err=True)
    if left.trouble:
        raise ArchiveError(f"groups that have left the buffer are missing: {left.trouble}")


def _print(
    groups: "Sequence[GroupRecord]",
    condition: "Condition",
    order: "Sort | None",
    *,
    limit: int,
    only_count: bool,
    as_json: bool,
) -> None:
    from rollq.monitor.groups.query_table import answers_of, as_lines, as_table

    if only_count:
        click.echo(len(groups))
        return
    answers = answers_of(groups[:limit], condition, order)
    if as_json:
        for line in as_lines(answers):
            click.echo(line)
    else:
        click.echo(as_table(answers, more=len(groups) > limit))


def parse_query_text(query: str) -> Any:
    """A query's JSON. Raises `ConfigError`."""
    import orjson

    try:
        return orjson.loads(query)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"QUERY {query!r}: not JSON: {error}") from error
