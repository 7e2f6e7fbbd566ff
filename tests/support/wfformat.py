"""What WfFormat 1.5 asks of an instance (https://github.com/wfcommons/WfFormat), as a table of its objects."""

import re

ID, FILE = re.compile(r"[0-9a-zA-Z_.#-]+"), re.compile(r"[0-9a-zA-Z_./:#-]+")
NUMBER = (int, float)
# Names that are required end with !; a list has one kind of items; a pattern matches a whole text.
TASK = {"name!": str, "id!": str, "parents!": [ID], "children!": [ID], "inputFiles": [FILE], "outputFiles": [FILE]}
COMMAND = {"program": str, "arguments": [str]}
RUN = {"id!": str, "runtimeInSeconds!": NUMBER, "executedAt": str, "command": COMMAND, "coreCount": NUMBER}
RUN |= {"readBytes": NUMBER, "writtenBytes": NUMBER, "machines": [str]}
MACHINE = {"nodeName!": re.compile(r"[0-9a-zA-Z.-]+"), "system": re.compile("linux|macos|windows"), "architecture": str}
MACHINE |= {"cpu": {"coreCount": int}}
SPECIFICATION = {"tasks!": [TASK], "files": [{"id!": FILE, "sizeInBytes!": int}]}
EXECUTION = {"makespanInSeconds!": NUMBER, "executedAt!": str, "tasks!": [RUN], "machines": [MACHINE]}
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
INSTANCE = {"name!": str, "description": str, "createdAt": DATE, "schemaVersion!": re.compile(r"1\.5")}
INSTANCE |= {"runtimeSystem": {"name!": str, "version!": str, "url": str}}
INSTANCE |= {"workflow!": {"specification!": SPECIFICATION, "execution": EXECUTION}}


def violations(value, kind=INSTANCE, where="instance"):
    """Yield what an instance does not fulfil."""
    if isinstance(kind, dict | list) and not isinstance(value, type(kind)):
        yield f"{where} is {value!r}"
    elif isinstance(kind, dict):
        names = {name.removesuffix("!"): (name.endswith("!"), inner) for name, inner in kind.items()}
        yield from (f"{where}.{name} is unknown" for name in value.keys() - names.keys())
        for name, (required, inner) in names.items():
            if name in value:
                yield from violations(value[name], inner, f"{where}.{name}")
            elif required:
                yield f"{where}.{name} is missing"
    elif isinstance(kind, list):
        for number, item in enumerate(value):
            yield from violations(item, kind[0], f"{where}[{number}]")
    elif isinstance(kind, re.Pattern):
        if not (isinstance(value, str) and kind.fullmatch(value)):
            yield f"{where} is {value!r}"
    elif not isinstance(value, kind) or value == "" or (kind is not str and value < 0):
        yield f"{where} is {value!r}"
