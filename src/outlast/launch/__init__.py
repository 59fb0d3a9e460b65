"""One machine: a template, a lighthouse, replica groups, restarts, chaos. Imports no torch but in the template."""
