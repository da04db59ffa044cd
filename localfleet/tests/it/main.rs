//! End to end: real daemons as processes, real trees on disk, real kills.

mod bad_input;
mod converges;
mod debian;
mod trees;
