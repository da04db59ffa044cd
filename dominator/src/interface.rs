//! What others see of the dominator: its methods, its pages and its metrics.

pub mod api;
pub mod metrics;
pub mod pages;
