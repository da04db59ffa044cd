//! What each set may call, and what patterns mean.

use clap::ValueEnum as _;
use expect_test::expect;

use std::collections::BTreeSet;

use api::access::{Identity, OwnedItem, Owners, authorize};

use super::*;

#[test]
fn each_pattern_of_a_set_matches_methods() {
    for &set in Set::value_variants() {
        for power in set.powers() {
            assert_eq!(parse_pattern(&power), Ok(power.clone()), "{set:?}");
        }
    }
}

#[test]
fn sets_may_call_what_they_must() {
    let mut text = String::new();
    for &set in Set::value_variants() {
        text += &format!("{}: {}\n", set.name(), set.kind().name().unwrap());
        for method in allowed(set.powers()) {
            text += &format!("    {method}\n");
        }
    }
    expect![[r#"
        dominator: service
            FileGenerator.Generate
            FileGenerator.GetContents
            FileGenerator.GetGenerators
            FileGenerator.GetSecrets
            FileGenerator.OrderRevision
            FileGenerator.SignContents
            ImageServer.GetImage
            ImageServer.GetPrivateDirectories
            ImageServer.HoldImages
            MdbServer.GetMdb
            ObjectServer.GetObjects
            Subd.AddObjects
            Subd.Cleanup
            Subd.Commit
            Subd.ContinueProvisioning
            Subd.CountOwners
            Subd.Fetch
            Subd.GetDirectories
            Subd.GetDirectoryBlocks
            Subd.GetFleetResources
            Subd.GetLimits
            Subd.GetRefusedChanges
            Subd.GetResources
            Subd.GetTaskLog
            Subd.GetTaskStates
            Subd.GetTasks
            Subd.GiveUpProvisioning
            Subd.HoldMachine
            Subd.Hurry
            Subd.OfferContents
            Subd.OfferImage
            Subd.OrderResource
            Subd.OrderTask
            Subd.PermitTask
            Subd.PlanResources
            Subd.Poll
            Subd.Prepare
            Subd.PreviewScan
            Subd.Provision
            Subd.ReplaceCertificate
            Subd.RetryTriggers
            Subd.ScanNow
            Subd.SetConfiguration
            Subd.SetNotRestarted
            Subd.TellFleetResources
        imageserver: service
            ImageServer.Forward
            ImageServer.GetImage
            ImageServer.GetImageUpdates
            ImageServer.GetMadeDirectories
            ObjectServer.AddObjects
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
        subd: machine
            ObjectServer.GetObjects
        mdbd: service
        filegen-server: service
        operator: user
            Dominator.AcceptClock
            Dominator.AcceptImage
            Dominator.AcceptMdb
            Dominator.Backup
            Dominator.CheckMdb
            Dominator.ClearSafetyShutoff
            Dominator.CountKeptFiles
            Dominator.DisableUpdates
            Dominator.EditEnvironments
            Dominator.EnableUpdates
            Dominator.EndRollback
            Dominator.Explain
            Dominator.FastUpdate
            Dominator.FenceMachine
            Dominator.ForceDisruptiveUpdate
            Dominator.GetConfiguration
            Dominator.GetResources
            Dominator.GetStatus
            Dominator.GetSubLimits
            Dominator.GetTask
            Dominator.GetTaskLog
            Dominator.GoOn
            Dominator.ListContentChanges
            Dominator.ListDeparting
            Dominator.ListEnvironments
            Dominator.ListEvents
            Dominator.ListLastingOrders
            Dominator.ListPermits
            Dominator.ListRollouts
            Dominator.ListSubs
            Dominator.ListTasks
            Dominator.OrderContentChange
            Dominator.OrderDeparting
            Dominator.OrderEnvironment
            Dominator.OrderResource
            Dominator.OrderRollout
            Dominator.OrderTasks
            Dominator.PauseUpdates
            Dominator.PlanMachine
            Dominator.PlanMachines
            Dominator.PlanResources
            Dominator.PlanRollout
            Dominator.ResumeImage
            Dominator.ResumeUpdates
            Dominator.Retry
            Dominator.RollBack
            Dominator.SetConfiguration
            Dominator.SetDefaultImage
            Dominator.ShowMdb
            Dominator.ShowSub
            Dominator.StartRollout
            Dominator.Trust
            Dominator.VoteOnStep
            Dominator.WatchSub
            FileGenerator.Generate
            FileGenerator.GetContents
            FileGenerator.GetGenerators
            FileGenerator.Load
            FileGenerator.OrderRevision
            FileGenerator.RenewCertificates
            ImageServer.EstimateImage
            ImageServer.FindLatestImage
            ImageServer.GetImage
            ImageServer.GetReplication
            ImageServer.ListDirectories
            ImageServer.ListImages
            MdbServer.GetMdb
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
            Subd.ForgetIssued
            Subd.GetConfiguration
            Subd.GetDirectories
            Subd.GetDirectoryBlocks
            Subd.GetFleetResources
            Subd.GetLimits
            Subd.GetRefusedChanges
            Subd.GetResources
            Subd.GetTaskStates
            Subd.GetTasks
            Subd.OrderResource
            Subd.OrderTask
            Subd.Pause
            Subd.Poll
            Subd.PreviewScan
            Subd.Resume
            Subd.ScanNow
            Subd.TakeOver
        uploader: user
            ImageServer.AddImage
            ImageServer.EstimateImage
            ImageServer.FindLatestImage
            ImageServer.GetImage
            ImageServer.GetReplication
            ImageServer.ListDirectories
            ImageServer.ListImages
            ObjectServer.AddObjects
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
        contributor: user
            ImageServer.EstimateImage
            ImageServer.FindLatestImage
            ImageServer.GetImage
            ImageServer.GetReplication
            ImageServer.ListDirectories
            ImageServer.ListImages
            ObjectServer.AddObjects
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
        viewer: user
            Dominator.CheckMdb
            Dominator.CountKeptFiles
            Dominator.Explain
            Dominator.GetConfiguration
            Dominator.GetResources
            Dominator.GetStatus
            Dominator.GetSubLimits
            Dominator.GetTask
            Dominator.ListDeparting
            Dominator.ListEnvironments
            Dominator.ListEvents
            Dominator.ListPermits
            Dominator.ListRollouts
            Dominator.ListSubs
            Dominator.ListTasks
            Dominator.PlanMachine
            Dominator.PlanMachines
            Dominator.PlanRollout
            Dominator.ShowMdb
            Dominator.ShowSub
            Dominator.WatchSub
            FileGenerator.Generate
            FileGenerator.GetContents
            FileGenerator.GetGenerators
            ImageServer.EstimateImage
            ImageServer.FindLatestImage
            ImageServer.GetImage
            ImageServer.GetReplication
            ImageServer.ListDirectories
            ImageServer.ListImages
            MdbServer.GetMdb
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
            Subd.GetConfiguration
            Subd.GetDirectories
            Subd.GetDirectoryBlocks
            Subd.GetFleetResources
            Subd.GetLimits
            Subd.GetRefusedChanges
            Subd.GetResources
            Subd.GetTaskStates
            Subd.GetTasks
            Subd.Poll
    "#]]
    .assert_eq(&text);
}

#[test]
fn a_machine_may_call_nothing_of_another_machine() {
    let machine = Identity {
        user: Some("web1".to_owned()),
        kind: Set::Subd.kind(),
        groups: BTreeSet::from(["web".to_owned()]),
        powers: Powers::new(Set::Subd.powers()),
        ..Identity::default()
    };
    let own = OwnedItem { what: "machine web1".to_owned(), owners: Owners::new(["web"], ["web1"]) };
    let (mut refused, mut let_in) = (0, Vec::new());
    for method in methods() {
        let got = authorize(method.name, method.access, &machine, "", std::slice::from_ref(&own));
        let is_of_subd = method.name.starts_with("Subd.");
        assert!(!is_of_subd || method.access == Access::Power, "{}", method.name);
        match got {
            Ok(()) if method.access == Access::Authenticated => {}
            Ok(()) => let_in.push(method.name),
            Err(_) => refused += usize::from(is_of_subd),
        }
    }
    let all = methods().iter().filter(|method| method.name.starts_with("Subd.")).count();
    assert_eq!(refused, all);
    // It serves from its own certificate, and calls what needs any certificate, and this.
    assert_eq!(let_in, ["ObjectServer.GetObjects"]);
}

#[test]
fn names_of_sets_are_those_of_the_command_line() {
    for &set in Set::value_variants() {
        assert_eq!(Set::from_str(set.name(), false), Ok(set));
    }
}

#[test]
fn only_patterns_that_match_are_taken() {
    let table = [
        ("*", Ok("*.*")),
        ("*.*", Ok("*.*")),
        ("Subd.*", Ok("Subd.*")),
        ("Subd.Poll", Ok("Subd.Poll")),
        (
            "Subd.poll",
            Err("`Subd.poll` is not a pattern of methods: write Service.Method, with * for any \
                 letters, such as 'Dominator.*', or '*' for everything"),
        ),
        (
            "ImageServer.GetObjects",
            Err("`ImageServer.GetObjects` matches no method; there are ObjectServer.GetObjects"),
        ),
        (
            "ObjectServer.Get",
            Err("`ObjectServer.Get` matches no method; there are ObjectServer.AddObjects, \
                 ObjectServer.CheckObjects, ObjectServer.GetObjects"),
        ),
        ("Nothing.Like", Err("`Nothing.Like` matches no method")),
    ];
    for (text, want) in table {
        let got = parse_pattern(text).map_err(|error| error.to_string());
        assert_eq!(got, want.map(str::to_owned).map_err(str::to_owned), "{text}");
    }
    assert_eq!(allowed(["ObjectServer.*"]).len(), 3);
    assert!(allowed_to_all().contains(&"Dominator.ListSubs"));
    assert!(!allowed_to_all().contains(&"Subd.Poll"));
}
