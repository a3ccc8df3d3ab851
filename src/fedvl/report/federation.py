"""What the page of a run between machines shows: its parties, and when each answered."""

from datetime import datetime

from fedvl.federation.records import Record
from fedvl.report.charts.comparing import Bar, bar_chart
from fedvl.report.charts.partition import MAX_BUBBLES
from fedvl.report.tables import MISSING, Cell, Values, cell_of, human_bytes
from fedvl.runs.contents import PartyBytes, Result
from fedvl.runs.folder import RunFolder

SIMULATED = ("data.partition",)  # settings that parties do not follow: they hold what they hold


def describe_federation(run: RunFolder) -> Values:
    """Return the template values of a run between machines; of a simulation they are empty."""
    parties = run.result.parties
    names = [party.name for party in parties]
    moments = {(answer.round, answer.client): answer.time for answer in run.result.answers}
    return {
        "party": run.result.party,
        "party_names": names,
        "parties": [_party_row(client, party, run, moments) for client, party in enumerate(parties)],
        "answers": [
            (record.round, [_answer(client, record, moments) for client in range(len(names))])
            for record in run.rounds
            if names
        ],
    }


def name_of(result: Result, client: int) -> str:
    """Return a client's name where it is a party, else its number."""
    if result.party:
        return result.party
    parties = result.parties
    return parties[client].name if client < len(parties) else str(client)


def _party_row(client: int, party: PartyBytes, run: RunFolder, moments: dict[tuple[int, int], str]) -> Values:
    asked = [record for record in run.rounds if client in record.cohort]
    missed = sum(client in record.dropped for record in asked)
    refused = sum(item.client == client for record in run.rounds for item in record.refused)
    last = max((time for (_, one), time in moments.items() if one == client), default=None)
    counts = [cell_of(value, "{:.0f}".format) for value in (len(asked) - missed, missed, refused)]
    carried = [cell_of(value, human_bytes) for value in (party.bytes_up, party.bytes_down)]
    revoked = f" (revoked on {_moment(party.revoked, '%Y-%m-%d').text})" if party.revoked else ""
    return {"name": f"{party.name}{revoked}", "cells": [*counts, *carried, _moment(last, "%Y-%m-%d %H:%M:%S")]}


def _answer(client: int, record: Record, moments: dict[tuple[int, int], str]) -> str:
    """Return when a client answered in a round, or why it does not count."""
    if client not in record.cohort:
        return "not asked"
    time = _moment(moments.get((record.round, client)), "%H:%M:%S").text
    if any(item.client == client for item in record.refused):
        return "refused" if time == MISSING else f"{time}, refused"
    return "dropped" if client in record.dropped else time


def _moment(time: str | None, form: str) -> Cell:
    """Return a time of the log, which is in UTC, without what nobody reads."""
    try:
        return Cell(MISSING, "") if time is None else Cell(datetime.fromisoformat(time).strftime(form), time)
    except ValueError:
        return Cell(MISSING, "")


def unheld(result: Result) -> tuple[str, ...]:
    """Return the settings that were not in force in a run."""
    return SIMULATED if result.party or result.parties else ()


def own_classes(result: Result, widths: tuple[int, ...]) -> list[str]:
    """Draw a party's training images of each class; nothing of unlabelled or too many classes."""
    counts = (result.partition_counts or [[]])[0]
    names = result.partition_class_names or result.class_names
    if not result.party or not any(counts) or len(counts) > MAX_BUBBLES:
        return []
    bars = [Bar(name, count, 0) for name, count in zip(names, counts, strict=False)]
    return [bar_chart([("", bars)], width, "{:,.0f}".format, "") for width in widths]
