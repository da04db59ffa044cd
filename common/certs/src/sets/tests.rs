//! What each set may call, and what patterns mean.

use clap::ValueEnum as _;
use expect_test::expect;

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
        text += &format!("{}\n", set.name());
        for method in allowed(set.powers()) {
            text += &format!("    {method}\n");
        }
    }
    expect![[r#"
        dominator
            ImageServer.GetImage
            ImageServer.HoldImages
            MdbServer.GetMdb
            ObjectServer.GetObjects
            Subd.Cleanup
            Subd.Commit
            Subd.Fetch
            Subd.GetDirectories
            Subd.GetRefusedChanges
            Subd.HoldMachine
            Subd.OfferImage
            Subd.Poll
            Subd.Prepare
            Subd.ScanNow
            Subd.SetConfiguration
        imageserver
            ImageServer.Forward
            ImageServer.GetImage
            ImageServer.GetImageUpdates
            ImageServer.GetMadeDirectories
            ObjectServer.AddObjects
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
        subd
            ObjectServer.GetObjects
        mdbd
        operator
            Dominator.AcceptClock
            Dominator.AcceptImage
            Dominator.AcceptMdb
            Dominator.Backup
            Dominator.CheckMdb
            Dominator.ClearSafetyShutoff
            Dominator.DisableUpdates
            Dominator.EnableUpdates
            Dominator.Explain
            Dominator.FastUpdate
            Dominator.ForceDisruptiveUpdate
            Dominator.GetConfiguration
            Dominator.GetStatus
            Dominator.GoOn
            Dominator.ListEvents
            Dominator.ListSubs
            Dominator.PauseUpdates
            Dominator.PlanMachine
            Dominator.PlanMachines
            Dominator.ResumeImage
            Dominator.ResumeUpdates
            Dominator.Retry
            Dominator.SetConfiguration
            Dominator.SetDefaultImage
            Dominator.ShowMdb
            Dominator.ShowSub
            Dominator.Trust
            Dominator.WatchSub
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
            Subd.GetRefusedChanges
            Subd.Pause
            Subd.Poll
            Subd.Resume
            Subd.ScanNow
            Subd.TakeOver
        uploader
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
        contributor
            ImageServer.EstimateImage
            ImageServer.FindLatestImage
            ImageServer.GetImage
            ImageServer.GetReplication
            ImageServer.ListDirectories
            ImageServer.ListImages
            ObjectServer.AddObjects
            ObjectServer.CheckObjects
            ObjectServer.GetObjects
        viewer
            Dominator.CheckMdb
            Dominator.Explain
            Dominator.GetConfiguration
            Dominator.GetStatus
            Dominator.ListEvents
            Dominator.ListSubs
            Dominator.PlanMachine
            Dominator.PlanMachines
            Dominator.ShowMdb
            Dominator.ShowSub
            Dominator.WatchSub
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
            Subd.GetRefusedChanges
            Subd.Poll
    "#]]
    .assert_eq(&text);
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
