/* A model of the fence (../fence.go) for Spin. ../model_test.go generates steps.pml
 * from the tables of the code: a number for each step, and the sequences of the
 * standard fence and of every broken one. A step is one atomic block here, as it
 * is one named point there; between two of them everything else may happen.
 *
 * Actors: two clients (three where traces are followed), the program, the idle timer with the ladder, the pollers
 * of guards, the relay, a user, the disk, the shim with its watchdog, and the
 * death and restart of daemon and shim. All transitions of a daemon are carried
 * out by the process engine for the one that holds the instance's lock, which
 * waits meanwhile.
 *
 * Not modeled: time. The ladder may act whenever its conditions hold, with one
 * exception: an automatic stop comes after every dial of the relay has ended
 * (microseconds against minutes). A program exits as soon as it receives SIGTERM. */

#include "steps.pml"

/* States of an instance. */
#define RUN 1
#define PSG 2 /* pausing */
#define PSD 3
#define RSM 4 /* resuming */
#define STG 5 /* stopping */
#define STP 6
#define STR 7 /* starting */
#define HIB 8

/* States of a client. */
#define OUT 0     /* not connected; the kernel drops its first packet or it has not begun */
#define GATED 1   /* the relay holds it */
#define PASS 2    /* the relay dials for it */
#define QUEUED 3  /* in the backlog, with a request */
#define UNREAD 4  /* accepted, its request is unanswered */
#define QUIET 5   /* accepted and answered */
#define HUNG 6    /* it closed, and the program has not noticed */
#define DONE 7
#define RESET 8
#define REFUSED 9

/* Operations of the engine. */
#define NONE 0
#define SERVE 1
#define PAUSE 2
#define WAKE 3
#define STOP 4
#define START 5
#define DEEPER 6
#define ADOPT 7

/* A trace of real programs (real) begins in the middle of things: a client of before
 * may have closed (hung) or close (late) unnoticed. What it shows of the reasons not
 * to pause is older than what the clients know. */
#ifdef TRACES
#define CLIENTS 3
#define EACH(x) x(0) x(1) x(2)
#define any(s) (is(0, s) || is(1, s) || is(2, s))
bool real, hung, late;
#else
#define CLIENTS 2
#define EACH(x) x(0) x(1)
#define any(s) (is(0, s) || is(1, s))
#define real 0
#define hung 0
#endif

/* The scenario, constant after init. */
bool quiet;    /* quiet connections do not hold */
bool deep;     /* the ladder hibernates, and does not stop */
byte paths;    /* of the clients: 1 direct, 2 relay, 3 either */
byte clients;  /* 1 to CLIENTS */
byte requests; /* of each client on its connection */
byte users;    /* calls of the user that remain */
byte verbs;    /* of the user: 1 stop, 2 start, 4 resume, 8 pause by force, 16 lease, 32 it reports work, 64 pause */
byte crashes;  /* of the daemon that remain */
byte kills;    /* of the shim that remain */
byte ends;     /* of the program, by itself, that remain */

/* The machine. */
bool alive = 1;
bool frozen, saved, term;
bool armed, fired;       /* a guard holds duplicates; its poll set has an event */
bool kept = 1, shut;     /* the shim keeps the sockets; they drop first packets */
bool shim = 1;
byte cs[CLIENTS], more[CLIENTS];
bool relayed[CLIENTS];
byte dst = RUN, dsby;    /* the record on disk: state, stopped by */

/* The daemon's memory. */
bool up = 1;
byte epoch;
byte st = RUN, sby;      /* sby: 1 the ladder, 2 a user */
bool lock, wanted, ended, stir, startreq, off;
bool hfrozen;            /* proc.frozen */
bool forgetful;          /* the guard's callback of a broken fence */
bool held, hfired;       /* the kept sockets of a stopped program are watched */
bool gheld, gasleep;
bool leased;
byte wpend, wpsby, waits; /* a record that is being written */
bool wdone, wlater;

/* The engine and its attempt. */
byte op, seq, k, code, ret, newst;
bool err, aidle, aforce, aadopted, afrozen, aguard, fact;

/* Ghosts: what promises are about. */
bool userstop;  /* a user has stopped it, or it has ended by itself */
bool promised;  /* a lease was acknowledged while it ran */
bool doomed[CLIENTS]; /* the client waited when an automatic stop began */

#define asleep (st == PSD || st == HIB)
#define is(i, s) (cs[i] == s)
#define busy (any(QUEUED) || any(UNREAD) || any(HUNG) && !real)
#define pending (any(QUEUED) || any(UNREAD) || any(HUNG) || hung)
#define open (any(UNREAD) || any(QUIET))
#define stirred (wanted || any(GATED) || ended)
#define eligible (!leased && !busy && !any(GATED) && (quiet || !any(PASS) && !any(QUIET)))
#define stopdue (!leased && (quiet || !any(QUIET)) && !any(PASS))

/* With TRACES the model follows recorded traces (trace_test.go): SEE is a step that
 * the recorder sees, and a run that does not do what was recorded is given up by
 * the claim follow. Everything else is hidden. */
#ifdef TRACES
#define SEE(e) seen = (e); c_code { follow(); };
byte seen, checks, later; /* later: checks of the next daemon */
int which, at, beyond;
c_code { \#include "follow.h"
};
#else
#define SEE(e)
#endif

/* What is seen. An event of a client has a number for each of them, a step that can
 * fail has one more if it did, and a call has one for each verb. At a tick a deadline
 * may be due. At the end nothing is left to do. */
#define E_queued 1
#define E_refused 4
#define E_accepted 7
#define E_answered 10
#define E_sent 13
#define E_closed 16
#define E_gone 19
#define E_gated 22
#define E_passed 25
#define E_turned 28
#define E_look 31
#define E_final 33
#define E_commit 35
#define E_stopintent 37
#define E_stoplook 39
#define E_intent 41
#define E_hold 42
#define E_sleep 43
#define E_release 44
#define E_freeze 45
#define E_thaw 46
#define E_arm 47
#define E_disarm 48
#define E_save 49
#define E_term 50
#define E_exit 51
#define E_start 52
#define E_stopped 53
#define E_lease 54
#define E_crash 55
#define E_end 56
#define E_tick 57
#define E_called 58

/* Sequences: the second index of fences in steps.pml. */
c_decl { static int variant, naive; /* naive: a daemon decides every automatic stop anew */ \
static int env(const char *name, int def) { char *v = getenv(name); return v ? atoi(v) : def; } }

#ifdef TRACES
#define BROKEN(property) c_code { now.at = LOST; }
#else
#define BROKEN(property) c_code { printf("property: " property "\n"); }; assert(false)
#endif

#define must(p, property) \
	if \
	:: (p) \
	:: else -> BROKEN(property) \
	fi

inline notice() { /* something reached the program's sockets */
	if
	:: armed -> fired = 1
	:: else
	fi
}

#ifndef TRACES
c_decl { static int timed, bare; /* timed: something may have been active too recently; bare: no socket is kept */ }
#endif

/* connect completes a handshake, whether the program runs or not. */
inline connect(i) {
	if
	:: alive && (relayed[i] || !shut) -> SEE(E_queued + i) cs[i] = QUEUED; notice()
	:: !alive && !relayed[i] && kept && !shut -> SEE(E_queued + i) cs[i] = QUEUED; hfired = held
	:: !relayed[i] && shut && (alive || kept) -> skip /* it sends the packet again */
	:: !alive && (relayed[i] || !kept) && !(!relayed[i] && shut && kept) ->
		must(userstop, "only a user's stop refuses a client");
		SEE(E_refused + i) cs[i] = REFUSED
	fi
}

inline cut(i) { /* the program ends */
	if
	:: is(i, HUNG) -> cs[i] = DONE
	:: is(i, QUEUED) && !relayed[i] && kept -> skip /* the next run accepts it */
	:: is(i, QUEUED) && (relayed[i] || !kept) ->
		must(userstop, "only a user's stop cuts a client in the backlog");
		cs[i] = RESET
	:: is(i, UNREAD) || is(i, QUIET) ->
		must(userstop || quiet && !doomed[i], "no request is lost to an automatic stop");
		cs[i] = RESET
	:: else
	fi
}

#define CUT(i) cut(i);

inline exits() {
	SEE(E_exit)
	alive = 0; frozen = 0; saved = 0; term = 0; ended = up;
	EACH(CUT)
}

inline letgo() {
	held = 0; hfired = 0; kept = 0; shut = 0;
	if
	:: !alive -> EACH(CUT)
	:: else
	fi
}

inline forget() { /* forgetRun and rest */
	if
	:: armed -> SEE(E_disarm) armed = 0
	:: else
	fi;
	fired = 0; hfrozen = 0; forgetful = 0;
	SEE(E_hold) gheld = 1;
	SEE(E_sleep) gasleep = 1;
	if
	:: sby == 1 && !c_expr { bare } -> kept = 1; shut = 0; held = 1; hfired = any(QUEUED)
	:: else -> letgo()
	fi
}

inline opengate() { SEE(E_release) gheld = 0; gasleep = 0 }

/* What is on disk is left out once no daemon can die anymore. */
inline save(s) {
	st = s; wpend = NONE; wpsby = 0; wlater = 0;
	if
	:: crashes > 0 -> dst = s; dsby = sby
	:: else -> dst = NONE; dsby = 0
	fi
}

inline thaws() {
	must(!armed, "no duplicate is held while the program runs");
	if
	:: frozen -> SEE(E_thaw) frozen = 0; saved = 0
	:: else
	fi;
	if
	:: term -> exits()
	:: else
	fi
}

/* recording is what must hold when the record of a sleep goes to disk. */
inline recording() {
	if
	:: newst == PSD ->
		must(frozen, "what is recorded as paused is frozen");
		must(armed, "what is recorded as paused is watched");
		must(gheld, "what is recorded as paused has a closed relay");
		must(!aidle || !promised, "a lease holds against the idle timer");
		must(!aidle || quiet || !open, "open connections hold against the idle timer")
	:: newst == HIB ->
		must(saved, "what is recorded as hibernated is saved");
		must(armed, "what is recorded as hibernated is watched")
	:: else
	fi
}

inline begins(s, f) { newst = s; fact = f; recording(); wpend = s; wpsby = sby; wdone = 0; waits = 1 }

#define DOOM(i) doomed[i] = frozen && (is(i, QUEUED) || is(i, UNREAD));

/* step carries out the step code of the attempt. */
inline step() {
	if
	:: atomic { code == S_intent -> SEE(E_intent) save(PSG) }
	:: atomic { code == S_closeGate -> SEE(E_hold) gheld = 1 }
	:: atomic { code == S_freeze ->
		if
		:: alive && !frozen -> SEE(E_freeze) frozen = 1; afrozen = 1; hfrozen = 1
		:: alive && frozen -> afrozen = 1; hfrozen = 1
		:: !alive -> err = 1
		fi }
	:: atomic { code == S_checkFrozen -> err = stirred || aidle && !eligible; SEE(E_look + err) skip }
	:: atomic { code == S_checkFrozen && (aidle && c_expr { timed } || real && !aforce) -> err = 1; SEE(E_look + err) skip }
	:: atomic { code == S_arm || code == S_armForgetful ->
		must(frozen, "sockets are watched while frozen");
		SEE(E_arm) armed = 1; aguard = 1; fired = pending; forgetful = (code == S_armForgetful) }
	:: atomic { code == S_finalCheck -> err = stirred || aguard && armed && pending; SEE(E_final + err) skip }
	:: atomic { code == S_checkUnlessForced -> err = !aforce && (stirred || aguard && armed && pending); SEE(E_stoplook + err) skip }
	:: atomic { code == S_commitPause && stirred -> err = 1; SEE(E_commit + 1) skip }
	:: atomic { code == S_commitPause && !stirred -> SEE(E_sleep) gasleep = 1;
		if
		:: aadopted -> begins(st, 0)
		:: else -> begins(PSD, 0)
		fi }; recorded()
	:: atomic { code == S_commitDeaf -> begins(PSD, 0) }; recorded()
	:: atomic { code == S_save -> must(frozen, "it is saved while frozen"); SEE(E_save) saved = 1 }
	:: atomic { code == S_commitSaved -> begins(HIB, 1) }; recorded()
	:: atomic { code == S_disarm ->
		if
		:: armed -> SEE(E_disarm) armed = 0
		:: else
		fi;
		fired = 0; aguard = 0; forgetful = 0 }
	:: atomic { code == S_thaw ->
		if
		:: afrozen -> thaws(); afrozen = 0; hfrozen = 0
		:: else
		fi }
	:: atomic { code == S_publishWoken -> st = RUN; opengate(); wlater = (crashes > 0) }
	:: atomic { code == S_publishUndone -> st = RUN; sby = 0; wanted = 0; opengate(); wlater = (crashes > 0) }
	:: atomic { code == S_stopIntent ->
		if
		:: !aforce -> sby = 1; EACH(DOOM)
		:: else -> sby = 2
		fi;
		if
		:: afrozen && !aforce -> begins(STG, 0)
		:: else -> SEE(E_stopintent) newst = NONE; save(STG)
		fi };
		if
		:: newst == STG -> recorded()
		:: else
		fi
	:: atomic { code == S_askToEnd -> term = 1;
		if
		:: alive -> SEE(E_term) skip
		:: else
		fi;
		if
		:: alive && !frozen -> exits()
		:: else
		fi }
	fi
}

/* recorded waits for the disk, unless a wake is asked for (saveFrozen). */
inline recorded() {
	do
	:: atomic { wdone -> wdone = 0; break }
	:: atomic { stir -> stir = 0;
		if
		:: stirred && fact -> wlater = (crashes > 0); break
		:: stirred && !fact -> err = 1; break
		:: else
		fi }
	od;
	atomic { waits = 0; wdone = 0;
		if
		:: newst == STG -> SEE(E_stopintent + err) skip
		:: else -> SEE(E_commit + err) skip
		fi;
		if
		:: !err -> st = newst
		:: err && newst == STG -> sby = 0
		:: else
		fi;
		if
		:: crashes == 0 -> wpend = NONE; wpsby = 0
		:: else
		fi;
		newst = NONE }
}

#define SPARE(i) doomed[i] = 0;
#define CALL(s, r) seq = s; k = 0; err = 0; ret = r; goto walk

/* engine carries out one operation for the holder of the lock. */
proctype engine() {
	byte e;
end:	do
	:: atomic { up && op != NONE -> e = epoch }; {
	if
	:: atomic { op == SERVE -> skip }; goto serve
	:: atomic { op == WAKE -> skip }; goto wake
	:: atomic { op == PAUSE -> aadopted = 0; afrozen = 0; aguard = 0; CALL(Q_pause, 1) }
	:: atomic { op == STOP -> afrozen = hfrozen; aguard = armed; aadopted = 0;
		if
		:: st == STP -> goto done
		:: st == STG -> goto finish
		:: else
		fi;
		if
		:: !aforce -> shut = !c_expr { bare }
		:: else -> userstop = 1; letgo()
		fi;
		if
		:: asleep -> CALL(Q_stop, 2)
		:: else -> CALL(Q_stopRunning, 2)
		fi }
	:: atomic { op == START -> held = 0; hfired = 0; save(STR) };
		atomic { kept = !c_expr { bare }; shut = 0 };
		atomic { shim ->
			must(!alive, "no program is started twice");
			SEE(E_start) alive = 1; frozen = 0; userstop = c_expr { bare }; ended = 0 };
		atomic {
			if
			:: ended && ends == 0 -> ended = 0; letgo(); SEE(E_stopped) save(STP); forget() /* before it was ready */
			:: sby = 0; save(RUN); opengate()
			fi;
			goto done }
	:: atomic { op == DEEPER -> aidle = 0; aforce = 0; aadopted = 0; afrozen = 0; aguard = 0; CALL(Q_deeper, 0) }
	:: atomic { op == ADOPT && st == STP -> forget(); goto done }
	:: atomic { op == ADOPT && st != STP && shim ->
		if
		:: !alive -> SEE(E_stopped) save(STP); goto rests
		:: else
		fi;
		if
		:: st == STG && sby == 1 && (!term || c_expr { naive }) -> st = PSD; sby = 0 /* it is decided anew */
		:: else
		fi;
		if
		:: saved && asleep -> st = HIB
		:: else
		fi;
		if
		:: st == STR -> sby = 0; save(RUN); opengate(); goto done
		:: st == STG -> afrozen = 1; aforce = 1; CALL(Q_resumeStop, 3)
		:: else -> shut = 0
		fi;
		if
		:: asleep && frozen -> hfrozen = 1; afrozen = 1; aguard = 0; aidle = 0; aforce = 1; aadopted = 1; CALL(Q_resumePause, 1)
		:: asleep && !frozen -> skip
		:: else -> thaws()
		fi };
		atomic { sby = 0; save(RUN); opengate(); goto done }
	fi;

serve:	if
	:: atomic { ended -> ended = 0;
		if
		:: st != STP && st != STG && st != STR -> SEE(E_stopped) save(STP); newst = STP
		:: else
		fi };
		if
		:: atomic { newst == STP -> newst = NONE; forget() }
		:: else
		fi
	:: else
	fi;
	atomic {
		if
		:: wanted && asleep -> wanted = 0; goto wake
		:: wanted && !asleep -> wanted = 0; startreq = startreq || st == STP && sby == 1
		:: else
		fi;
		goto done };

wake:	atomic { st = RSM; afrozen = hfrozen; aguard = armed; aidle = 0; aforce = 0; aadopted = 0; CALL(Q_wake, 0) };

walk:	do
	:: atomic { !err -> c_code { now.code = fences[variant][now.seq][now.k]; }; k++ };
		if
		:: code == 0 -> break
		:: else -> step()
		fi
	:: err -> break
	od;
	atomic {
		code = 0; k = 0; seq = 0; fact = 0;
		if
		:: ret == 1 && err -> CALL(Q_undo, 0)
		:: ret == 2 && err && aforce -> goto finish
		:: ret == 2 && err && !aforce && st == STG -> CALL(Q_undo, 4)
		:: ret == 2 && err && !aforce && st != STG -> shut = 0; goto done /* it was not recorded */
		:: ret == 2 && !err -> goto finish
		:: ret == 3 -> goto finish
		:: ret == 4 -> shut = 0; goto done
		:: else -> goto done
		fi };

finish:	atomic { !alive -> SEE(E_stopped) ended = 0; leased = 0; promised = 0; save(STP) };

rests:	atomic { forget() };

done:	atomic { op = NONE; EACH(SPARE)
		if
		:: !stirred -> stir = 0 /* or it has no effect */
		:: else
		fi;
		 err = 0; ret = 0; aidle = 0; aforce = 0; aadopted = 0; afrozen = 0; aguard = 0; newst = NONE }
	} unless { epoch != e };
	e = 0
	od
}

inline call(o) { op = o; op == NONE }

inline acquire() { atomic { !lock -> lock = 1 } }

inline serves() {
	if
	:: wanted || ended -> call(SERVE)
	:: else
	fi
}

/* release checks again after it: a request that found the lock taken is seen. */
inline release() {
	do
	:: lock = 0;
		if
		:: !wanted && !ended -> break
		:: else
		fi;
		if
		:: atomic { !lock -> lock = 1 }; serves()
		:: lock -> break
		fi
	od
}

inline tryserve() {
	if
	:: atomic { !lock -> lock = 1 }; serves(); release()
	:: lock
	fi
}

inline wantwake() { wanted = 1; stir = 1; tryserve() }

/* poller is the callback of guards. */
proctype poller() {
	byte e;
end:	do
	:: atomic { up && armed && fired -> fired = 0; e = epoch }; {
		if
		:: armed && !forgetful -> wantwake()
		:: armed && forgetful ->
			if
			:: atomic { !lock -> lock = 1; wanted = 1 }; call(SERVE); lock = 0
			:: lock
			fi
		:: !armed
		fi } unless { epoch != e };
		e = 0
	:: atomic { up && held && hfired -> hfired = 0; e = epoch }; { wantwake() } unless { epoch != e };
		e = 0
	:: atomic { up && ended && !lock -> e = epoch }; { tryserve() } unless { epoch != e };
		e = 0
	od
}

#ifdef TRACES
#define MAYCHECK checks > 0 /* as often as it did */
#define LOOKS(p) true       /* it decides below, once it has the lock */
#define CHECKED checks--;
#define MAYNOT false
#define CEASES false
#define NEXTCHECKS if :: real -> checks = later :: else fi;
#define AGAIN(i) armed && requests > 1 && (is(i, QUEUED) || is(i, UNREAD))
proctype clock() { do :: atomic { SEE(E_tick) checks++ } od }
#else
#define MAYCHECK true
#define LOOKS(p) (p)
#define CHECKED
#define MAYNOT true
#define CEASES true
#define NEXTCHECKS
#define AGAIN(i) false
#endif

/* ladder is the deadline of the instance. It may cease to act at any time: no
 * client depends on it. Where traces are followed, it acts as often as recorded. */
proctype ladder() {
	byte e;
end:	do
	:: CEASES -> goto endgone
	:: atomic { up && !lock && (st == RUN && LOOKS(eligible) || st == PSD && LOOKS(deep || stopdue || !armed)) && MAYCHECK -> CHECKED lock = 1; e = epoch }; {
		serves();
		if
		:: atomic { st == RUN && (eligible || real) -> aidle = 1; aforce = 0 }; call(PAUSE)
		:: asleep && !armed -> call(WAKE) /* repair */
		:: st == PSD && armed && deep -> call(DEEPER)
		:: atomic { st == PSD && armed && !deep && stopdue -> aforce = 0; aidle = 0 }; call(STOP)
		:: else
		fi;
		release() } unless { epoch != e };
		e = 0
	od;
endgone: false
}

/* starter starts a stopped instance for a connection. */
proctype starter() {
	byte e;
	bool o;
end:	do
	:: atomic { up && startreq -> startreq = 0; o = off; e = epoch }; {
		acquire(); serves();
		if
		:: o == off && st == STP && sby == 1 -> call(START)
		:: asleep -> call(WAKE)
		:: else
		fi;
		release() } unless { epoch != e };
		atomic { e = 0; o = 0 }
	od
}

#define ASKS(i) :: is(i, GATED) -> who = i

/* waker is the relay's request for the clients that it holds. */
proctype waker() {
	byte e, who;
	bool o, no;
end:	do
	:: atomic { up && gheld && gasleep && any(GATED) ->
		if
		EACH(ASKS)
		fi;
		o = off; no = 0; e = epoch; stir = 1 }; {
		if
		:: acquire(); serves();
			if
			:: st == STP && (o != off || sby != 1) -> no = 1
			:: st == STP && o == off && sby == 1 -> call(START);
				if
				:: st == STP -> no = 1
				:: else
				fi
			:: asleep -> call(WAKE)
			:: else
			fi;
			release()
		:: deep && o != off -> no = 1 /* a guest may have to wait for room, and the stop ends that */
		fi;
		atomic {
			if
			:: no && is(who, GATED) ->
				must(userstop, "only a user's stop has the relay turn a client away");
				SEE(E_turned + who) cs[who] = REFUSED
			:: else
			fi } } unless { epoch != e };
		atomic { e = 0; who = 0; no = 0; o = 0 }
	od
}

/* user calls the daemon. */
proctype user() {
	byte e, v;
	bool o;
end:	do
	:: atomic { up && users > 0 -> users--; e = epoch; o = off;
		if
		:: verbs & 1 -> SEE(E_called + 0) v = 1; off = !off; userstop = 1
		:: verbs & 2 -> SEE(E_called + 1) v = 2
		:: verbs & 4 -> SEE(E_called + 2) v = 4
		:: verbs & 8 -> SEE(E_called + 3) v = 8
		:: verbs & 16 -> SEE(E_called + 4) v = 16
		:: verbs & 32 -> SEE(E_called + 5) v = 32
		:: verbs & 64 -> SEE(E_called + 6) v = 64
		:: MAYNOT -> v = 0
		fi }; {
		if
		:: v == 32 -> wantwake()
		:: else
		fi;
		acquire(); serves();
		if
		:: atomic { v == 1 && st != STP -> wanted = 0; aforce = 1; aidle = 0 }; call(STOP)
		:: atomic { v == 1 && st == STP -> wanted = 0; userstop = 1; sby = 2; save(STP); letgo() }
		:: v == 2 && st == STP -> call(START)
		:: (v == 2 || v == 4) && asleep -> call(WAKE)
		:: atomic { (v == 8 || v == 64) && st == RUN -> aforce = (v == 8); aidle = 0 }; call(PAUSE)
		:: atomic { v == 16 && st != STP && st != STG ->
			if
			:: !leased -> SEE(E_lease) leased = 1
			:: else
			fi; promised = promised || st == RUN }
		:: else
		fi;
		release() } unless { epoch != e };
		atomic { e = 0; v = 0; o = 0 }
	od
}

/* disk writes records. One of a canceled pause may still reach it. */
proctype disk() {
end:	do
	:: atomic { up && wpend != NONE ->
		if
		:: crashes > 0 -> dst = wpend; dsby = wpsby
		:: else
		fi;
		wpend = NONE; wpsby = 0; wdone = waits }
	:: atomic { up && wlater && wpend == NONE -> dst = st; dsby = sby; wlater = 0 }
	od
}

#ifdef TRACES
#define SEEN_HUNG hung = 0
proctype leftover() { do :: atomic { late && !hung -> hung = 1; notice() } od }
#else
#define SEEN_HUNG skip
#endif

#define WORK(i) \
	:: atomic { alive && !frozen && is(i, QUEUED) -> SEE(E_accepted + i) cs[i] = UNREAD } \
	:: atomic { alive && !frozen && is(i, UNREAD) -> SEE(E_answered + i) cs[i] = QUIET } \
	:: atomic { alive && !frozen && is(i, HUNG) -> SEE(E_gone + i) cs[i] = DONE }

proctype program() {
end:	do
	EACH(WORK)
	:: atomic { alive && !frozen && hung -> SEEN_HUNG }
	:: atomic { alive && !frozen && ends > 0 -> ends--; userstop = 1; exits() }
	od
}

proctype client(byte i) {
	do
	:: atomic { is(i, OUT) && !relayed[i] && !(shut && (alive || kept)) -> connect(i) }
	:: atomic { is(i, OUT) && relayed[i] && up && gheld -> SEE(E_gated + i) cs[i] = GATED }
	:: atomic { is(i, OUT) && relayed[i] && up && !gheld -> SEE(E_passed + i) cs[i] = PASS }
	:: atomic { is(i, GATED) && !gheld -> SEE(E_passed + i) cs[i] = PASS }
	:: atomic { is(i, PASS) -> connect(i) }
	:: atomic { is(i, QUIET) && more[i] > 0 -> SEE(E_sent + i) more[i]--; cs[i] = UNREAD; notice() }
	:: atomic { is(i, QUIET) -> SEE(E_closed + i) cs[i] = HUNG; notice() }
	:: atomic { AGAIN(i) -> notice() } /* it sends more, or closes, before it is answered */
	:: is(i, QUIET) && more[i] == 0 -> break /* it stays connected */
	:: cs[i] >= DONE -> break
	od
}

#define FALLS(i) \
	if \
	:: relayed[i] && cs[i] > OUT && cs[i] < DONE -> cs[i] = RESET /* the relay ends with its daemon */ \
	:: else \
	fi;

/* chaos ends daemon and shim. A signal for a saved guest ends with its daemon. */
proctype chaos() {
end:	do
	:: atomic { up && crashes > 0 -> SEE(E_crash) crashes--; up = 0; epoch++; term = term && !saved;
		lock = 0; wanted = 0; ended = 0; stir = 0; startreq = 0; hfrozen = 0; forgetful = 0; held = 0; hfired = 0;
		armed = 0; fired = 0; gheld = 1; gasleep = 0; wpend = NONE; wpsby = 0; waits = 0; wdone = 0; wlater = 0;
		op = NONE; seq = 0; k = 0; code = 0; ret = 0; newst = NONE; err = 0; aidle = 0; aforce = 0; aadopted = 0; afrozen = 0; aguard = 0; fact = 0;
		NEXTCHECKS
		EACH(FALLS) }
	:: atomic { shim && kills > 0 -> kills--; shim = 0 }
	od
}

/* watchdog is the shim where it acts by itself: without a daemon it thaws, and
 * its watchdog starts the next one. */
proctype watchdog() {
end:	do
	:: atomic { !up && frozen && !saved -> thaws(); shim = 1 }
	:: atomic { !shim && (up || !frozen) -> shim = 1 }
	od
}

proctype boot() {
	byte e;
end:	do
	:: atomic { !up -> SEE(E_hold) SEE(E_sleep) up = 1; lock = 1; st = dst; sby = dsby; op = ADOPT; e = epoch }; { op == NONE; release() } unless { epoch != e };
		e = 0
	od
}

#ifdef TRACES
#define quiescent (up && !lock && op == NONE && !wanted && !ended && !pending && !startreq && !(gheld && gasleep && any(GATED)))
proctype end() { atomic { quiescent -> SEE(E_end) skip } }
#endif

#define PATH(i) \
	if \
	:: paths & 1 -> relayed[i] = 0 \
	:: paths & 2 -> relayed[i] = 1 \
	fi;
#define MORE(i) more[i] = requests - 1;

init {
	atomic {
#ifndef TRACES
		c_code { variant = env("FENCE", 0); naive = env("NAIVE", 0); timed = env("TIMED", 0); bare = env("BARE", 0); now.quiet = env("QUIET", 0); now.deep = env("DEEP", 0); now.paths = env("PATHS", 3); \
			now.clients = env("CLIENTS", 2); \
			now.requests = env("REQUESTS", 2); now.users = env("USERS", 0); now.verbs = env("VERBS", 31); \
			now.crashes = env("CRASHES", 0); now.kills = env("KILLS", 0); now.ends = env("ENDS", 0); };
		EACH(PATH)
#else
		c_code { load(); };
		do
		:: c_expr { now.which + 1 < recorded_traces } -> which++ /* none is left out */
		:: break
		od;
		c_code { scenario(); };
		run end();
		if
		:: real -> hung = 1; run leftover()
		:: else -> run clock()
		fi;
#endif
		c_code { now.kept = !bare; now.userstop = bare; };
		EACH(MORE)
		run program(); run engine(); run ladder(); run poller(); run starter(); run waker(); run disk();
		if
		:: users > 0 -> run user()
		:: else
		fi;
		if
		:: users > 1 -> run user()
		:: else
		fi;
		if
		:: crashes > 0 || kills > 0 -> run chaos(); run watchdog(); run boot()
		:: else
		fi;
		run client(0);
		if
		:: clients > 1 -> run client(1)
		:: else
		fi
#ifdef TRACES
		;
		if
		:: clients > 2 -> run client(2)
		:: else
		fi
#endif
	}
}

#ifdef TRACES
never follow { do :: c_expr { now.at != LOST && !accepted[now.which] } od }
#else
#define waiting (cs[0] == GATED || cs[0] == PASS || cs[0] == QUEUED || cs[0] == UNREAD || cs[0] == HUNG)
ltl answered { [] (waiting -> <> !waiting) }
#endif
