"""For the reference: each of several parameters that one line describes has its own default."""

import griffe


class OwnDefaults(griffe.Extension):
    """Of `nodes, nodes_seed : int` both would be shown with the default of the first."""

    def on_package(self, *, pkg, **kwargs):
        for thing in self._documented(pkg):
            for section in thing.docstring.parsed:
                if section.kind is griffe.DocstringSectionKind.parameters:
                    for described in section.value:
                        if described.name in thing.parameters:
                            described.value = thing.parameters[described.name].default

    def _documented(self, thing):
        """Functions and classes that say something, in all that is loaded."""
        if thing.docstring and (thing.is_function or thing.is_class):
            yield thing
        for member in thing.members.values():
            if not member.is_alias:
                yield from self._documented(member)
