//! What others reach subd by: RPC methods, pages and metrics.

pub mod operator;
pub mod pages;
pub mod server;
