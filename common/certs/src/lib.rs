//! Makes certificates and signatures: what needs the private keys of operators.
//!
//! [`authority`] makes certificates in memory, [`register`] keeps an authority in a directory,
//! [`place`] puts files where daemons read them, and [`sets`] has the powers that each role needs.
//! [`signing_key`] signs images. Daemons do not depend on this crate.

pub mod authority;
pub mod pem;
pub mod place;
pub mod record;
pub mod register;
pub mod sets;
pub mod signing_key;
