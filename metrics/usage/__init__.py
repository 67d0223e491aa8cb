"""Usage records: what each call used, for bills and audits. Pure functions over files of lines."""
