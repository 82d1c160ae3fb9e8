//! The `cairn` binary: one subcommand per role.

fn main() {}
