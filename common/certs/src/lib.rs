//! Makes certificates and signatures with the private keys of operators.
//!
//! [`authority`] makes certificates in memory, [`register`] stores an authority in a directory,
//! [`files`] writes certificates where daemons read them, [`pairs`] keeps those that a server makes
//! for machines, and [`sets`] lists the powers of each role. [`signing_key`] signs images. Of the
//! daemons, only filegen-server depends on this crate.

pub mod authority;
pub mod files;
pub mod pairs;
pub mod pem;
pub mod record;
pub mod register;
pub mod sets;
pub mod signing_key;
