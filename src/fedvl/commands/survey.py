"""fedvl survey: what the sites of a federation have, before training."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Json, Out, Quiet


def survey(
    federation: Annotated[Path, typer.Argument(help="Folder that fedvl federation init made.")],
    experiment: Annotated[str | None, typer.Option(help="Which of its experiments, if there are several.")] = None,
    class_names: Annotated[
        bool,
        typer.Option(
            "--class-names", help="Also compare the sites' class names, which a site sends if its policy allows it."
        ),
    ] = False,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let the sites check their images before training; the server learns counts only.

    Each site runs: fedvl client FOLDER --data IMAGES --survey
    """
    from fedvl.commands.federation import end_on_termination
    from fedvl.config import read_toml
    from fedvl.deployment.files import choose_experiment
    from fedvl.deployment.server import federation_summary
    from fedvl.deployment.survey import survey_sites
    from fedvl.display import TerminalDisplay
    from fedvl.report.survey_page import survey_lines, write_survey_page
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.settings import resolve_experiment

    end_on_termination()
    resolved = resolve_experiment(read_toml(choose_experiment(federation, experiment)))
    with RunFolder.create(out, resolved, federation_summary(federation)) as folder, TerminalDisplay(quiet) as display:
        found = survey_sites(folder, display, class_names)
    page = write_survey_page(found, folder.path / "survey.html")
    if as_json:
        print(found.model_dump_json())
        return
    for line in survey_lines(found):
        print(line)
    print(f"The page: {page}")
