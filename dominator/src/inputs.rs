//! What the dominator reads and watches: the machine database, as a file or from an mdbd.

pub mod mdb_file;
pub mod mdb_server;
