"""The files of docs/extending.md, each short and whole."""
