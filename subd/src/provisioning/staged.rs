//! What the image of an update asks for: made of what the update plans and of objects that are
//! known by their digest.

use model::display::error_chain;
use model::plan::{Plan, apply};
use model::tree::Tree;
use model::trigger::Triggers;
use provisioning::image::{Definition, ImageError, definition};

use crate::cache::Cache;
use crate::provisioning::plugins::Plugins;
use crate::root::Root;
use crate::tasks::staged::read;

/// Why the resources of an update cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct ResourcesError {
    why: String,
}

impl From<ImageError> for ResourcesError {
    fn from(error: ImageError) -> Self {
        Self { why: error_chain(&error) }
    }
}

/// Returns what an image with `triggers` asks for, when `plan` has been carried out on `scanned`,
/// and keeps copies of the plugins that it brings.
pub fn resources_after(
    triggers: &Triggers,
    plan: &Plan,
    scanned: &Tree,
    (root, cache): (&Root, &Cache),
    plugins: Option<&Plugins>,
) -> Result<Definition, ResourcesError> {
    if !triggers.have_resources() {
        return Ok(Definition::default());
    }
    let fail = |why: String| ResourcesError { why };
    let after =
        apply(scanned, &plan.without_blocked()).map_err(|error| fail(error_chain(&error)))?;
    let definition = definition(triggers, &after, |file| {
        let bytes = read(&file.path, &file.object, file.bytes_max(), root, cache).map_err(fail)?;
        if let (true, Some(plugins)) = (file.is_plugin, plugins) {
            let kept = plugins.keep(&file.object.to_string(), &bytes);
            kept.map_err(|error| fail(format!("cannot keep {}: {error}", file.path)))?;
        }
        Ok::<_, ResourcesError>(bytes)
    })?;
    Ok(definition.unwrap_or_default())
}
