"""Metrics of a run in Prometheus format, read from its folder at each request.

The folder outlives the process, so counters go on after a crash. Labels are the names of the
federation's parties, which do not change during a run.
"""

from http.server import ThreadingHTTPServer
from pathlib import Path

from fedvl.report.loopback import page_server
from fedvl.report.prometheus import CONTENT_TYPE, Metric, exposition
from fedvl.report.status import read_status
from fedvl.runs.folder import RunFolder


def run_metrics(folder: Path) -> str:
    """Return how a run stands: its rounds, messages, parties and budget."""
    found = read_status(folder)
    records, parties = found.records, found.parties
    asked = sum(len(record.cohort) for record in records)
    dropped = sum(len(record.dropped) for record in records)
    metrics = [
        Metric("rounds_planned", "gauge", "Rounds of the experiment.", found.rounds),
        Metric("rounds_committed_total", "counter", "Rounds that are safe on disk.", len(records)),
        Metric("run_finished", "gauge", "Whether the result is written.", int(RunFolder(folder).finished)),
        Metric("requests_total", "counter", "Clients asked to train, in committed rounds.", asked),
        Metric("requests_answered_total", "counter", "Clients that answered, in committed rounds.", asked - dropped),
        Metric("requests_refused_total", "counter", "Messages of clients that were refused.", len(found.refused)),
        Metric("received_bytes_total", "counter", "Bytes of tensors from clients.", found.bytes_up),
        Metric("sent_bytes_total", "counter", "Bytes of tensors to clients.", found.bytes_down),
    ]
    if records:
        metrics.append(Metric("round_seconds", "gauge", "Seconds of the last round.", records[-1].seconds))
        tested = [record.accuracy for record in records if record.accuracy is not None]
        metrics += [Metric("accuracy_percent", "gauge", "Accuracy at the last test.", tested[-1])] if tested else []
        if budget := records[-1].privacy:
            spent = "Privacy budget spent (differential privacy)."
            metrics.append(Metric("epsilon_spent", "gauge", spent, {budget.unit: budget.epsilon}, "unit"))
    if parties:
        connected = {party.name: int(party.state != "not connected") for party in parties}
        metrics += [
            Metric("clients", "gauge", "Parties of the federation.", len(parties)),
            Metric("clients_connected", "gauge", "Parties that are connected.", sum(connected.values())),
            Metric("client_connected", "gauge", "Whether a party is connected.", connected, "party"),
        ]
    if found.certificate_days is not None:
        left = "Days for which the server's certificate is valid."
        metrics.append(Metric("certificate_days", "gauge", left, found.certificate_days))
    return exposition(metrics)


def metrics_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Make the server of /metrics of a run, on this machine alone."""
    return page_server(port, "/metrics", lambda: run_metrics(folder), CONTENT_TYPE, "--metrics")
