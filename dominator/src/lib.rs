//! The central controller: it keeps every machine equal to its image.
//!
//! The modules are layers, and each uses only those below it: [`daemon`] puts the parts together,
//! [`interface`] answers callers, [`inputs`] reads the machine database, [`runtime`] carries out
//! what [`core`] decides, and [`storage`] keeps what must survive a restart.
//! `docs/ARCHITECTURE.md` has the map, `docs/OPERATING.md` the statuses that operators see.

pub mod core;
pub mod daemon;
pub mod inputs;
pub mod interface;
pub mod runtime;
pub mod storage;
