// Command minecraft serves or plays Minecraft with a protocol library that this
// project did not write: "serve ADDRESS", or "play ADDRESS", which stays on the
// server until it is killed.
package main

import (
	"log"
	"os"

	"github.com/Tnze/go-mc/bot"
	"github.com/Tnze/go-mc/chat"
	"github.com/Tnze/go-mc/net"
	"github.com/Tnze/go-mc/net/packet"
	"github.com/Tnze/go-mc/server"
	"github.com/Tnze/go-mc/yggdrasil/user"
	"github.com/google/uuid"
)

// lobby lets players stay.
type lobby struct{ *server.PlayerList }

type guest struct{ *net.Conn }

func (guest) SendDisconnect(chat.Message) {}

// AcceptPlayer implements server.GamePlay.
func (l lobby) AcceptPlayer(name string, id uuid.UUID, _ *user.PublicKey, _ []user.Property, _ int32, conn *net.Conn) {
	g := guest{conn}
	l.ClientJoin(g, server.PlayerSample{Name: name, ID: id})
	defer l.ClientLeft(g)
	var p packet.Packet
	for conn.ReadPacket(&p) == nil {
	}
}

func main() {
	if os.Args[1] == "play" {
		log.Fatal(bot.NewClient().JoinServer(os.Args[2]))
	}
	players := server.NewPlayerList(20)
	s := server.Server{
		ListPingHandler: struct {
			*server.PingInfo
			*server.PlayerList
		}{server.NewPingInfo("test", server.ProtocolVersion, chat.Text("a server"), nil), players},
		LoginHandler: &server.MojangLoginHandler{Threshold: -1}, // nothing is compressed
		GamePlay:     lobby{players},
	}
	log.Fatal(s.Listen(os.Args[2]))
}
