"""The depth limit of a language model: characters of real text, L against infinity."""
