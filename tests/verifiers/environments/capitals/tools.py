"""The tool of `capitals`, a server of its own for each rollout."""

from __future__ import annotations

import verifiers.v1 as vf

CAPITALS = {"Freedonia": "Marxville", "Ruritania": "Strelsau", "Sylvania": "Ambassador", "Zubrowka": "Lutz"}


class CapitalTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "atlas"

    @vf.tool
    def capital(self, country: str) -> str:
        """The capital of a country."""
        return CAPITALS.get(country, "unknown")


if __name__ == "__main__":
    CapitalTools.run()
