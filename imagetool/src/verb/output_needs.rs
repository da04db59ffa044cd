//! Refuses an image with a computed file that is made of the outputs of a resource which only this
//! image brings: no machine could ever get it, because machines get resources with images, and
//! their outputs after that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::file_generator::{GetGenerators, GetGeneratorsRequest};
use model::display::error_chain;
use model::image::{Content, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::Tree;
use model::trigger::Triggers;
use provisioning::image::{ImageError, ImageFile, texts, unchecked_definition};
use rpc::client::{Client, Peer};
use rpc::trees::TreeReader;

use super::Context;
use crate::input_files::computed::FILEGEN_PORT;
use crate::output::failure::Failure;
use crate::transfer::download;
use crate::transfer::small_files::contents;

/// How long a filegen-server may take to name its generators.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// Checks a new image whose objects are on the server. `former` is the image before it.
pub(super) async fn check(
    context: &Context,
    content: &Content,
    tree: &Tree,
    former: Option<&ImageName>,
) -> Result<(), Failure> {
    if content.computed.is_empty() || !content.triggers.have_resources() {
        return Ok(());
    }
    let own = resources(context, &content.triggers, tree).await?;
    let used = used_outputs(context, content).await;
    for (path, _) in used.iter().filter(|(_, id)| id == "*") {
        eprintln!(
            "warning: {path} is made of outputs of resources, and it is not known of which: no \
             machine can have it if only this image brings them"
        );
    }
    let mut brought: Vec<(String, String)> =
        used.into_iter().filter(|(_, id)| own.contains(id)).collect();
    if let Some(former) = former
        && !brought.is_empty()
    {
        let there = former_resources(context, former).await?;
        brought.retain(|(_, id)| !there.contains(id));
    }
    match brought.first() {
        None => Ok(()),
        Some((path, id)) => Err(Failure::from_text(format!(
            "{path} is made of the outputs of the resource `{id}`, which only this image brings"
        ))
        .hint(
            "machines tell outputs when they have the resource: first add an image with the \
               resource and without this file, and the file with the next one",
        )),
    }
}

/// Returns the computed files that are made of outputs, each with a resource.
async fn used_outputs(context: &Context, content: &Content) -> Vec<(String, String)> {
    let sources: BTreeSet<&str> = content.computed.iter().map(|rule| &*rule.source).collect();
    let mut used = Vec::new();
    for source in sources {
        match generators(context, source).await {
            Ok(generators) => {
                let is_of_image = |path: &TreePath| {
                    content.computed.iter().any(|rule| rule.source == source && rule.path == *path)
                };
                for generator in generators.into_iter().filter(|one| is_of_image(&one.path)) {
                    let path = generator.path.to_string();
                    used.extend(generator.resources.into_iter().map(|id| (path.clone(), id)));
                }
            }
            Err(why) => eprintln!(
                "warning: whether computed files need outputs of the image's own resources was not \
                 looked at: {why}"
            ),
        }
    }
    used
}

async fn generators(
    context: &Context,
    source: &str,
) -> Result<Vec<api::file_generator::Generator>, String> {
    let peer = Peer::parse(source, FILEGEN_PORT).map_err(|error| error_chain(&error))?;
    let client = Client::new(peer, &context.security);
    let request = GetGeneratorsRequest::default();
    let reply = client.call_within::<GetGenerators>(&request, ASK_LIMIT).await;
    let reply = reply.map_err(|error| error_chain(&error))?;
    Ok(reply.generators.map(|told| told.generators).unwrap_or_default())
}

async fn former_resources(
    context: &Context,
    former: &ImageName,
) -> Result<BTreeSet<String>, Failure> {
    let reader = Arc::new(TreeReader::new(1));
    let image = reader.image(&context.client, former, Duration::ZERO).await;
    let image = image.map_err(|error| Failure::new(&error))?;
    resources(context, &image.content.triggers, &image.tree).await
}

/// Returns the ids of the resources of an image whose objects are on the server.
async fn resources(
    context: &Context,
    triggers: &Triggers,
    tree: &Tree,
) -> Result<BTreeSet<String>, Failure> {
    let files = texts(triggers, tree).map_err(|error| Failure::new(&error))?;
    let wanted: Vec<_> = files.iter().map(|file| (file.object, file.size_bytes)).collect();
    let read = contents(&context.client, "resource files", &wanted, &context.meter).await;
    let read = read.map_err(|error| download::failure(&error))?;
    let read: BTreeMap<ObjectId, Vec<u8>> =
        files.iter().map(|file| file.object).zip(read).collect();
    let definition = unchecked_definition(triggers, tree, |file: &ImageFile| {
        Ok::<_, ImageError>(read.get(&file.object).cloned().unwrap_or_default())
    });
    let definition = definition.map_err(|error| Failure::new(&error))?.unwrap_or_default();
    let (resources, _) = definition.read().map_err(|error| Failure::new(&error))?;
    Ok(resources.iter().map(|resource| resource.id.clone()).collect())
}
