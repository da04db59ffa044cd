//! What others reach subd by: RPC methods, pages and metrics.

mod metrics;
pub mod operator;
pub mod pages;
pub mod server;
pub mod service;
