//! Every method with a sample of its request and its reply.

use api::method::Method;
use api::{dominator, file_generator, image_server, mdb, object_server, subd};

use schemars::JsonSchema;

use crate::samples;

/// What is done with each method.
pub trait Visitor {
    fn method<M>(&mut self, sample: (M::Request, M::Reply))
    where
        M: Method<Request: JsonSchema, Reply: JsonSchema>;
}

/// Shows all methods to `visitor`.
pub fn all(visitor: &mut impl Visitor) {
    subd(visitor);
    image_server(visitor);
    object_server(visitor);
    dominator(visitor);
    mdb(visitor);
    file_generator(visitor);
}

// tidy: table
pub fn subd(visitor: &mut impl Visitor) {
    visitor.method::<subd::Poll>(samples::poll());
    visitor.method::<subd::GetDirectories>(samples::get_directories());
    visitor.method::<subd::Fetch>(samples::fetch());
    visitor.method::<subd::Prepare>(samples::prepare());
    visitor.method::<subd::Commit>(samples::commit());
    visitor.method::<subd::Cleanup>(samples::cleanup());
    visitor.method::<subd::GetConfiguration>(((), samples::configuration()));
    visitor.method::<subd::SetConfiguration>((samples::set_configuration(), Default::default()));
    visitor.method::<subd::ScanNow>((samples::scan_now(), Default::default()));
    visitor.method::<subd::Pause>((samples::paused(), Default::default()));
    visitor.method::<subd::Resume>(((), Default::default()));
    visitor.method::<subd::GetFiles>(samples::get_files());
    visitor.method::<subd::CheckHealth>(((), samples::check_health()));
    visitor.method::<subd::OfferImage>((samples::offer_image(), Default::default()));
    visitor.method::<subd::OfferContents>((samples::offer_contents(), Default::default()));
    visitor.method::<subd::ForgetIssued>(samples::forget_issued());
    visitor.method::<subd::GetRefusedChanges>(samples::get_refused_changes());
    visitor.method::<subd::GetDirectoryBlocks>(samples::get_directory_blocks());
    visitor.method::<subd::HoldMachine>(samples::hold_machine());
    visitor.method::<subd::TakeOver>(samples::take_over());
    visitor.method::<subd::RetryTriggers>(((), Default::default()));
    visitor.method::<subd::PreviewScan>(samples::preview_scan());
    visitor.method::<subd::GetLimits>(((), samples::limits_in_force()));
    visitor.method::<subd::Hurry>(((), Default::default()));
    visitor.method::<subd::CountOwners>(samples::count_owners());
    visitor.method::<subd::AddObjects>((samples::add_to_cache(), Default::default()));
    visitor
        .method::<subd::ReplaceCertificate>((samples::replace_certificate(), Default::default()));
    visitor.method::<subd::GetTasks>(samples::get_tasks());
    visitor.method::<subd::GetTaskStates>(samples::get_task_states());
    visitor.method::<subd::OrderTask>((samples::order_task(), Default::default()));
    visitor.method::<subd::GetTaskLog>(samples::get_task_log());
    visitor.method::<subd::PermitTask>(samples::permit_task());
    visitor.method::<subd::SetNotRestarted>((samples::set_not_restarted(), Default::default()));
    visitor.method::<subd::Provision>((samples::provision(), Default::default()));
    let go_on = samples::continue_provisioning();
    visitor.method::<subd::ContinueProvisioning>((go_on, Default::default()));
    let give_up = samples::give_up_provisioning();
    visitor.method::<subd::GiveUpProvisioning>((give_up, Default::default()));
    visitor.method::<subd::PlanResources>(samples::plan_resources());
    visitor.method::<subd::GetResources>(samples::get_resources());
    let order = samples::order_resource();
    visitor.method::<subd::OrderResource>((order, Default::default()));
    visitor.method::<subd::GetFleetResources>(samples::get_fleet_resources());
    let telling = samples::tell_fleet_resources();
    visitor.method::<subd::TellFleetResources>((telling, Default::default()));
}

pub fn image_server(visitor: &mut impl Visitor) {
    visitor.method::<image_server::AddImage>(samples::add_image());
    visitor.method::<image_server::GetImage>(samples::get_image());
    visitor.method::<image_server::ListImages>(samples::list_images());
    visitor.method::<image_server::DeleteImage>(samples::delete_image());
    visitor.method::<image_server::collection::Collect>(samples::collect());
    visitor.method::<image_server::notes::CopyImage>(samples::copy_image());
    visitor.method::<image_server::notes::ChangeTags>(samples::change_tags());
    visitor.method::<image_server::notes::FindLatestImage>(samples::find_latest_image());
    visitor.method::<image_server::directories::MakeDirectory>(samples::make_directory());
    visitor.method::<image_server::directories::RemoveDirectory>(samples::remove_directory());
    visitor.method::<image_server::directories::ChangeOwner>(samples::change_owner());
    visitor.method::<image_server::directories::ListDirectories>(samples::list_directories());
    visitor.method::<image_server::private::ChangeReaders>(samples::change_readers());
    visitor
        .method::<image_server::private::GetPrivateDirectories>(samples::get_private_directories());
    visitor.method::<image_server::collection::EstimateImage>(samples::estimate_image());
    visitor.method::<image_server::expiry::ChangeExpiry>(samples::change_expiry());
    visitor.method::<image_server::expiry::AcceptClock>(samples::accept_clock());
    visitor.method::<image_server::expiry::HoldImages>(samples::hold_images());
    visitor.method::<image_server::notes::ChangeSignatures>(samples::change_signatures());
    use image_server::replication::{DropCopy, Forward, GetImageUpdates, GetReplication};
    visitor.method::<GetImageUpdates>(samples::get_image_updates());
    use image_server::replication::directories::GetMadeDirectories;
    visitor.method::<GetMadeDirectories>(samples::get_made_directories());
    visitor.method::<Forward>(samples::forward());
    visitor.method::<GetReplication>(samples::get_replication());
    visitor.method::<DropCopy>(samples::drop_copy());
}

pub fn object_server(visitor: &mut impl Visitor) {
    visitor.method::<object_server::AddObjects>(samples::add_objects());
    visitor.method::<object_server::CheckObjects>(samples::check_objects());
    visitor.method::<object_server::GetObjects>(samples::get_objects());
}

pub fn dominator(visitor: &mut impl Visitor) {
    visitor.method::<dominator::ListSubs>(samples::list_subs());
    visitor.method::<dominator::ShowSub>(samples::show_sub());
    visitor.method::<dominator::GetStatus>(samples::get_status());
    visitor.method::<dominator::DisableUpdates>(samples::disable_updates());
    visitor.method::<dominator::EnableUpdates>(samples::enable_updates());
    visitor.method::<dominator::ClearSafetyShutoff>(samples::clear_safety_shutoff());
    visitor.method::<dominator::Retry>(samples::retry());
    visitor.method::<dominator::orders::Trust>(samples::trust());
    visitor.method::<dominator::orders::AcceptImage>(samples::accept_image());
    visitor.method::<dominator::orders::ResumeImage>(samples::resume_image());
    visitor.method::<dominator::content::ListContentChanges>(samples::list_content_changes());
    visitor.method::<dominator::content::OrderContentChange>(samples::order_content_change());
    visitor.method::<dominator::mdb::ShowMdb>(samples::show_mdb());
    visitor.method::<dominator::mdb::AcceptMdb>(samples::accept_mdb());
    visitor.method::<dominator::events::ListEvents>(samples::list_events());
    visitor.method::<dominator::events::AcceptClock>(samples::accept_dominator_clock());
    visitor.method::<dominator::events::Backup>(samples::backup());
    visitor.method::<dominator::explain::Explain>(samples::explain());
    visitor.method::<dominator::orders::PauseUpdates>(samples::pause_updates());
    visitor.method::<dominator::orders::ResumeUpdates>(samples::resume_updates());
    visitor.method::<dominator::rollback::RollBack>(samples::roll_back());
    visitor.method::<dominator::rollback::EndRollback>(samples::end_rollback());
    visitor.method::<dominator::rollback::ListLastingOrders>(samples::list_lasting_orders());
    visitor.method::<dominator::orders::ForceDisruptiveUpdate>(samples::force_disruptive_update());
    visitor.method::<dominator::orders::GoOn>(samples::go_on());
    visitor.method::<dominator::permits::FenceMachine>(samples::fence_machine());
    visitor.method::<dominator::permits::ListPermits>(((), samples::list_permits()));
    visitor.method::<dominator::departing::ListDeparting>(((), samples::list_departing()));
    visitor.method::<dominator::departing::OrderDeparting>(samples::order_departing());
    visitor.method::<dominator::orders::FastUpdate>(samples::fast_update());
    visitor.method::<dominator::orders::WatchSub>(samples::watch_sub());
    visitor.method::<dominator::orders::SetDefaultImage>(samples::set_default_image());
    visitor.method::<dominator::plan::PlanMachine>(samples::plan_machine());
    visitor.method::<dominator::plan::PlanMachines>(samples::plan_machines());
    visitor.method::<dominator::plan::CheckMdb>(samples::check_mdb());
    visitor.method::<dominator::settings::SetSubConfiguration>(samples::set_sub_configuration());
    visitor.method::<dominator::settings::GetSubConfiguration>(samples::get_sub_configuration());
    visitor.method::<dominator::settings::GetSubLimits>(samples::get_sub_limits());
    visitor.method::<dominator::tasks::ListTasks>(samples::list_tasks());
    visitor.method::<dominator::tasks::GetTask>(samples::get_task());
    visitor.method::<dominator::tasks::OrderTasks>(samples::order_tasks());
    visitor.method::<dominator::tasks::GetTaskLog>(samples::get_fleet_task_log());
    visitor.method::<dominator::kept_files::CountKeptFiles>(samples::count_kept_files());
    let plans = samples::plan_resources_of_machines();
    visitor.method::<dominator::resources::PlanResources>(plans);
    visitor.method::<dominator::resources::GetResources>(samples::machine_resources());
    let order = samples::order_machine_resource();
    visitor.method::<dominator::resources::OrderResource>((order, Default::default()));
    visitor.method::<dominator::rollouts::EditEnvironments>(samples::edit_environments());
    visitor.method::<dominator::rollouts::OrderEnvironment>(samples::order_environment());
    visitor.method::<dominator::rollouts::ListEnvironments>(samples::list_environments());
    visitor.method::<dominator::rollouts::PlanRollout>(samples::plan_rollout());
    visitor.method::<dominator::rollouts::StartRollout>(samples::start_rollout());
    visitor.method::<dominator::rollouts::OrderRollout>(samples::order_rollout());
    visitor.method::<dominator::rollouts::VoteOnStep>(samples::vote_on_step());
    visitor.method::<dominator::rollouts::ListRollouts>(samples::list_rollouts());
}

pub fn mdb(visitor: &mut impl Visitor) {
    visitor.method::<mdb::GetMdb>(samples::get_mdb());
}

pub fn file_generator(visitor: &mut impl Visitor) {
    visitor.method::<file_generator::Generate>(samples::generate());
    visitor.method::<file_generator::GetContents>(samples::get_contents());
    visitor.method::<file_generator::GetSecrets>(samples::get_secrets());
    visitor.method::<file_generator::GetGenerators>(samples::get_generators());
    visitor.method::<file_generator::OrderRevision>(samples::order_revision());
    visitor.method::<file_generator::SignContents>(samples::sign_contents());
    visitor.method::<file_generator::Load>(samples::load_configuration());
    visitor.method::<file_generator::RenewCertificates>(samples::renew_certificates());
}
