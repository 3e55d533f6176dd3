"""Profiles: whose rules say what counts as read from the cache and written to it.

Each is a frozen dataclass of settings with one pure function, ``decide``: from the outline of a
prompt, what is promised of it, and the time, to counters and entries.
"""

from collections.abc import Mapping

from anaphora.profiles.anthropic import Anthropic
from anaphora.profiles.local import Local
from anaphora.profiles.openai import OpenAI

__all__ = ["DEFAULT_PROFILE", "PROFILES", "Anthropic", "Local", "OpenAI", "Profile"]

Profile = Local | Anthropic | OpenAI

DEFAULT_PROFILE: Profile = Local()

PROFILES: Mapping[str, Profile] = {
    profile.name: profile for profile in (DEFAULT_PROFILE, Anthropic(), OpenAI())
}
"""All of them by name, with the providers' own values."""
