//! Takes edits of environments, orders about rollouts, and votes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::access::Identity;
use api::dominator::rollouts::{
    EditEnvironmentsReply, EditEnvironmentsRequest, EnvironmentOrder, OrderEnvironmentRequest,
    OrderRolloutRequest, OrderedReply, RolloutVerb, StartRolloutReply, StartRolloutRequest,
    VoteOnStepRequest,
};
use model::image::{Content, ImageName};
use rollouts::definition::EnvironmentEdit;
use rollouts::document::{Kind, Revision, VoteEvent, name_of};
use rollouts::plan::{StepPlan, plan};
use rollouts::state::{
    EditOutcome, Editor, Edits, RolloutOrder, SharedMachines, StartOrder, State,
};
use rollouts::steps::Said;

use super::{digest_of, images_in};
use crate::core::environment_owners::OwnerCheck;
use crate::core::orders::{Order, end_of};
use crate::core::rollouts::{check_bundle, check_default};
use crate::runtime::fleet::{Fleet, OrderError};

impl Fleet {
    /// Edits groups and environments.
    pub async fn edit_environments(
        self: &Arc<Self>,
        request: EditEnvironmentsRequest,
        identity: Arc<Identity>,
    ) -> Result<EditEnvironmentsReply, OrderError> {
        let EditEnvironmentsRequest { groups, environments, whole, dry_run, why, who } = request;
        let content = self.shared.computed.newest_content();
        let edits = Edits { groups, environments, whole, content };
        // Nothing is asked of the image server for callers who may not edit.
        OwnerCheck::new(&identity, &self.rollout_state()).expect_may_edit(&edits)?;
        self.expect_images_of(&edits.environments).await?;
        let names: Vec<&str> = edits.environments.iter().map(|edit| edit.name.as_str()).collect();
        let order = Order::new("edit-environments", &who).about(names.join(" ")).why(&why);
        let order = order.checked()?;
        let edit = move |fleet: &Self| {
            if dry_run {
                return Ok(fleet.try_edits(edits, who, why)?.2);
            }
            fleet.change_rollouts(&order, |state, mdb, editor| {
                OwnerCheck::new(&identity, state).expect_may_edit(&edits)?;
                fleet.edit(state, edits, editor, mdb)
            })
        };
        Ok(EditEnvironmentsReply { outcomes: self.on_thread(edit).await? })
    }

    /// Returns what rollouts of these edits would do; nothing is stored.
    pub async fn plan_edits(
        self: &Arc<Self>,
        request: EditEnvironmentsRequest,
    ) -> Result<Vec<StepPlan>, OrderError> {
        let EditEnvironmentsRequest { groups, environments, whole, why, who, .. } = request;
        let given = self.expect_images_of(&environments).await?;
        let content = self.shared.computed.newest_content();
        let edits = Edits { groups, environments, whole, content };
        let planned = move |fleet: &Self| {
            let (next, mdb, outcomes) = fleet.try_edits(edits, who, why)?;
            let new = outcomes.iter().filter_map(|one| Some((&one.name, one.revision?)));
            let digest = |image: &str| {
                digest_of(&fleet.shared, image).or_else(|| Some(given.get(image)?.digest()))
            };
            Ok(new.map(|(name, revision)| plan(&next, &mdb, name, revision, digest)).collect())
        };
        self.on_thread(planned).await
    }

    /// Makes edits.
    fn edit(
        &self,
        state: &mut State,
        edits: Edits,
        editor: &Editor,
        mdb: &SharedMachines,
    ) -> Result<Vec<EditOutcome>, Said> {
        let outcomes = state.edit(edits, editor, mdb)?;
        check_default(state, self.shared.default_image().as_deref().map(|one| &one.image))?;
        Ok(outcomes)
    }

    /// Returns the state after edits that are not stored, the machine database, and what they do.
    fn try_edits(
        &self,
        edits: Edits,
        who: String,
        why: String,
    ) -> Result<(State, SharedMachines, Vec<EditOutcome>), OrderError> {
        let mdb = self.locked().admission.current().machines().clone();
        let mut next = State::clone(&self.state().rollouts.get());
        let now = self.shared.clock.now().wall;
        let outcomes = self.edit(&mut next, edits, &Editor { who, why, now }, &mdb)?;
        Ok((next, mdb, outcomes))
    }

    /// Returns the content of images, by name. Fails if the image server does not give one.
    async fn expect_images(
        &self,
        images: BTreeSet<ImageName>,
    ) -> Result<BTreeMap<String, Content>, OrderError> {
        let mut contents = BTreeMap::new();
        for image in images {
            let content = self.shared.images.get_content(&image).await.map_err(|why| {
                Said::new(404, format!("the image server does not give {image}: {why}"))
            })?;
            contents.insert(image.as_str().to_owned(), content);
        }
        Ok(contents)
    }

    /// The same for the images that edits name. Fails also if one cannot be a bundle.
    async fn expect_images_of(
        &self,
        edits: &[EnvironmentEdit],
    ) -> Result<BTreeMap<String, Content>, OrderError> {
        let sources = || edits.iter().map(|edit| &edit.source);
        let images = sources().filter_map(|source| source.image().cloned());
        let contents = self.expect_images(images.collect()).await?;
        let bundles = sources().filter(|source| source.is_bundle());
        for bundle in bundles.filter_map(|source| source.image()) {
            check_bundle(&contents[bundle.as_str()])?;
        }
        Ok(contents)
    }

    /// Deletes an environment, freezes it, or says whether it is active.
    pub async fn order_environment(
        self: &Arc<Self>,
        request: OrderEnvironmentRequest,
        identity: Arc<Identity>,
    ) -> Result<OrderedReply, OrderError> {
        let OrderEnvironmentRequest { name, order: what, why, who } = request;
        let verb = match what {
            EnvironmentOrder::Activate => "activate-environment",
            EnvironmentOrder::Deactivate => "deactivate-environment",
            EnvironmentOrder::Delete { .. } => "delete-environment",
            EnvironmentOrder::Freeze { .. } => "freeze-environment",
            EnvironmentOrder::Unfreeze => "unfreeze-environment",
        };
        let order = Order::new(verb, &who).about(&name).why(&why);
        let order = match what {
            EnvironmentOrder::Freeze { .. } => order.reasoned("the environment is frozen")?,
            _ => order.checked()?,
        };
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, mdb, editor| {
                OwnerCheck::new(&identity, state).expect_may_order(&name, what)?;
                let is_active = match what {
                    EnvironmentOrder::Delete { force } => {
                        state.delete(&name, force, mdb, editor.now)?;
                        return Ok(format!("{name} is deleted"));
                    }
                    EnvironmentOrder::Freeze { until } => {
                        let until = until.map(|end| end_of(end, editor.now));
                        return state.freeze(&name, until, editor);
                    }
                    EnvironmentOrder::Unfreeze => return state.unfreeze(&name, editor),
                    EnvironmentOrder::Activate => true,
                    EnvironmentOrder::Deactivate => false,
                };
                let has_changed = state.set_active(&name, is_active)?;
                let was = if has_changed { "is now" } else { "was already" };
                Ok(match state.environments.get(&name) {
                    Some(one) if !is_active => {
                        format!("{name} {was} not active; {}", one.inactive_means())
                    }
                    _ => format!("{name} {was} active"),
                })
            })
        };
        Ok(OrderedReply { message: self.on_thread(change).await? })
    }

    /// Starts a rollout.
    pub async fn start_rollout(
        self: &Arc<Self>,
        request: StartRolloutRequest,
        identity: Arc<Identity>,
    ) -> Result<StartRolloutReply, OrderError> {
        let StartRolloutRequest {
            environments,
            scan,
            rollback,
            urgent,
            allow_deprecated,
            why,
            who,
        } = request;
        let order = Order::new("start-rollout", &who).about(environments.join(" ")).why(&why);
        let order = order.reasoned("the rollout is started")?;
        let kind = if rollback { Kind::Rollback } else { Kind::User };
        let start = StartOrder { environments, kind, scan, urgent, allow_deprecated };
        OwnerCheck::new(&identity, &self.rollout_state()).expect_may_start(&start)?;
        self.expect_images(self.images_of(&start.environments)).await?;
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, _, editor| {
                OwnerCheck::new(&identity, state).expect_may_start(&start)?;
                state.start(&start, editor)
            })
        };
        Ok(StartRolloutReply { id: format!("r{}", self.on_thread(change).await?) })
    }

    /// Returns the images of revisions that are named as `NAME@REVISION`.
    fn images_of(&self, named: &[String]) -> BTreeSet<ImageName> {
        let state = self.state().rollouts.get();
        let of = |text: &String| {
            let (name, number) = text.split_once('@')?;
            let revision =
                state.environments.get(name)?.revisions.get(&number.parse::<Revision>().ok()?)?;
            Some(images_in(revision))
        };
        named.iter().filter_map(of).flatten().collect()
    }

    /// Carries out an order about a rollout.
    pub async fn order_rollout(
        self: &Arc<Self>,
        request: OrderRolloutRequest,
        identity: Arc<Identity>,
    ) -> Result<OrderedReply, OrderError> {
        let OrderRolloutRequest { id, order: verb, why, who } = request;
        let (name, what) = match verb {
            RolloutVerb::Stop => ("stop-rollout", RolloutOrder::Stop),
            RolloutVerb::Cancel => ("cancel-rollout", RolloutOrder::Cancel),
            RolloutVerb::RollBack => ("roll-back-rollout", RolloutOrder::RollBack),
            RolloutVerb::Resolve => ("resolve-rollout", RolloutOrder::Resolve),
        };
        let order = Order::new(name, &who).about(&id).why(&why);
        let order = order.reasoned("the rollout does not go on as it was started")?;
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, _, editor| {
                OwnerCheck::new(&identity, state).expect_may_order_rollout(&id)?;
                state.order(&id, what, editor)
            })
        };
        Ok(OrderedReply { message: self.on_thread(change).await? })
    }

    /// Takes a vote.
    pub async fn vote(
        self: &Arc<Self>,
        request: VoteOnStepRequest,
    ) -> Result<OrderedReply, OrderError> {
        let VoteOnStepRequest { rollout, step, vote, digest, once, why, who } = request;
        let about = format!("{rollout}/{step}");
        let what = format!("{} {digest}", name_of(&vote));
        let order = Order::new("vote", &who).about(about).what(what).why(&why).checked()?;
        let vote = VoteEvent { step, voter: who, vote, digest, link_valid: true };
        let change = move |fleet: &Self| {
            fleet.change_rollouts(&order, |state, _, _| {
                if once {
                    state.expect_no_vote(&rollout, &vote)?;
                }
                state.vote(&rollout, vote)
            })
        };
        Ok(OrderedReply { message: self.on_thread(change).await? })
    }
}
